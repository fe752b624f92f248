"""What GPUs showed: the series of each lease (`recorder`), and the history of each GPU (`history_recorder`).

They differ in what they are exact about. A lease's series begins with its grant, ends with it, and has 300 to 600
buckets whatever its age, so that GPU-hours are right to the second and a job of ten minutes can be read second by
second months later. A GPU's history follows the calendar and does not ask who holds it; what is older is coarser.
Both are rows of one table (`store.gpu_metrics_table`).
"""
