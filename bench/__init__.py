"""The benchmark: a file a subject, outputs verified before anything is timed. `python -m bench --list`."""
