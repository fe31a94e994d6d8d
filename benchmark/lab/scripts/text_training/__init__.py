"""The text that the byte-level model of benchmark/pages/text.py is trained on and tried on."""
