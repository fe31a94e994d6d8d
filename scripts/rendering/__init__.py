"""What pages are filled in with: figures and tables of measurements, and reference made from the code."""
