"""From the command line to schedulers that have proved that our parts are live in them."""
