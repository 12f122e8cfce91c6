"""The benchmark: one question a file, outputs verified before anything is timed. `python -m bench --list`."""
