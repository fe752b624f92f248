"""`GPUExecutor`: a `concurrent.futures.Executor` that runs its tasks on leased GPUs."""
