"""The definition of the signal, in plain torch."""
