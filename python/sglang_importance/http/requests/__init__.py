"""Requests for answers, on their way into sglang: their hints, and token ids that the model does not have."""
