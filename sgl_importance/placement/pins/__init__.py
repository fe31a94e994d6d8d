"""Soft pins: text that goes last, within a budget."""
