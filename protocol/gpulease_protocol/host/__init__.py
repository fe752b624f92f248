"""What each program needs to know about its host: processes, addresses, configuration files, logging, garbage."""
