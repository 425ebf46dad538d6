"""GPU: kernels beside their floors, and what adapters cost an engine. `python -m bench.gpu`; see __main__.py."""
