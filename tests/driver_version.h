/* The driver version that the stand-in libraries tell. */
#pragma once
#include <stdio.h>
#include <string.h>

/* That of the loaded kernel module, so that a stand-in fits it on a host with a driver; 580.95.05 on one without. */
static const char *driver_version(void) {
    static char version[64];
    if (*version) return version;
    FILE *file = fopen("/proc/driver/nvidia/version", "r");
    char word[64], found[64] = "580.95.05";
    /* NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (x@y) */
    while (file && fscanf(file, "%63s", word) == 1)
        if (strchr(word, '.') && strspn(word, "0123456789.") == strlen(word)) {
            strcpy(found, word);
            break;
        }
    if (file) fclose(file);
    return strcpy(version, found);
}
