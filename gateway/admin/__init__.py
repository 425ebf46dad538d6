"""Admin REST: tenants, keys, adapters, usage."""
