"""State: everything that routes work with, built once by the lifespan and handed over as request.state.chorus."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from adapters.registry import AdapterRegistry
    from adapters.spec import BaseShape
    from adapters.storage import AdapterStore
    from engine.text import Tokenizer
    from gateway.conversation_store import ConversationStore
    from gateway.inference import Inference
    from gateway.kv_owners import KVOwners
    from gateway.metrics import Metrics
    from gateway.pins import Pins
    from gateway.probes import Prober
    from gateway.replays import Replays
    from gateway.replicas import ReplicaSet
    from gateway.settings import Settings
    from gateway.upload import UploadGate
    from tenants.admin_keys import AdminKeyRing
    from tenants.audit import AuditLog
    from tenants.db import Database
    from tenants.directory import TenantDirectory
    from tenants.keys import KeyRing
    from tenants.plans import PlanBook
    from tenants.quotas import Quotas
    from tenants.state import Client
    from tenants.usage import UsageLedger


@dataclass(frozen=True)
class State:
    """One gateway worker's services. Nothing here is replaced after start."""

    settings: Settings
    database: Database
    redis: Client
    keys: KeyRing
    admin_keys: AdminKeyRing
    quotas: Quotas
    ledger: UsageLedger
    directory: TenantDirectory
    plans: PlanBook
    audit: AuditLog
    registry: AdapterRegistry
    store: AdapterStore
    shape: BaseShape
    replicas: ReplicaSet
    pins: Pins
    kv_owners: KVOwners
    prober: Prober
    tokenizer: Tokenizer
    inference: Inference
    conversations: ConversationStore
    replays: Replays
    metrics: Metrics
    uploads: UploadGate
