"""Redis as the gateway uses it: connect(), short timeouts, RedisUnavailable, scripts that survive SCRIPT FLUSH.

Values are str (decode_responses). A server that came back under a new run id may have forgotten its last second:
`Redis.generation` moves then, and caches that trust Redis are to be read anew.
"""

from __future__ import annotations

from tenants.db import StateUnavailable


class RedisUnavailable(StateUnavailable):
    """Redis does not answer."""
