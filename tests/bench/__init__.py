"""The benchmark: its measures at tiny sizes, its pages and its reports."""
