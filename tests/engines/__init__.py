"""Each engine, and the parts that engines share."""
