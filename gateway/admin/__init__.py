"""Admin REST: tenants, keys, adapters, usage."""

from __future__ import annotations

from gateway.admin import adapters, keys, tenants, usage

routers = (tenants.router, keys.router, *adapters.routers, usage.router)
