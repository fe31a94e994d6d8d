"""KV pages in two tiers: all of them on the host, some of them in slots on the device.

Torch without a server: where pages are (``page_slots``), the pages that requests are filling
(``open_pages``), and exact attention over more pages than the device holds (``streamed_attention``).
"""
