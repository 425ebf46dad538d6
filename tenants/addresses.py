"""Lists of addresses that a key may be used from: single ones and networks, IPv4 and IPv6. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from tenants.limits import InvalidSettings

MAX_ADDRESSES = 256
Network = IPv4Network | IPv6Network


def check_addresses(addresses: Iterable[str] | None, param: str = "allowed_ips") -> list[str] | None:
    """In their shortest form, as they are stored. Raises InvalidSettings."""
    if addresses is None:
        return None
    found = list(addresses)
    try:
        if len(found) > MAX_ADDRESSES or not all(isinstance(text, str) for text in found):
            raise ValueError
        return [str(ip_network(text.strip())) for text in found]
    except ValueError:
        message = f"{param} must be null or up to {MAX_ADDRESSES} addresses or networks such as 10.0.0.0/8"
        raise InvalidSettings(message, param) from None


def networks(addresses: Sequence[str] | None) -> tuple[Network, ...] | None:
    return None if addresses is None else tuple(ip_network(text) for text in addresses)


def is_within(address: str, allowed: tuple[Network, ...] | None) -> bool:
    """None allows every address, an empty list none. What is no address (a Unix socket) is in no list."""
    if allowed is None:
        return True
    try:
        found = ip_address(address)
    except ValueError:
        return False
    if isinstance(found, IPv6Address) and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    return any(found in network for network in allowed)
