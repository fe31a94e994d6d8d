"""The text that the byte-level model of benchmark/sparse/text.py is trained on and tried on."""
