from flashinfer import __getattr__ as __getattr__
