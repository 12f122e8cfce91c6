"""Encoders of torchscale and Prov-GigaPath, against plain ones that are written out here."""
