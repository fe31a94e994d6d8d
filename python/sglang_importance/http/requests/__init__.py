"""Requests for answers, on their way into sglang: their hints, and the check of their fields."""
