"""Which keys some queries need: for ranks, for decoding, for what a cache may drop."""
