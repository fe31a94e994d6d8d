"""Copies between the device and host: HiCache, which cannot be served with this."""

from sgl_kernel import __getattr__ as __getattr__
