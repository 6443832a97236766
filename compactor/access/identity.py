"""Identity of a tier: the catalog that names it, the owner of its data root, and its secret hash key."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from compactor.access.metadata import TierMetadata
from compactor.config.settings import Settings
from compactor.control.identity import Ownership, foreign_problem
from compactor.control.logs import HASH_KEY_BYTES, CatalogLog, create_tier
from compactor.control.ports import Ports
from compactor.control.state import CatalogState
from compactor.errors import UsageError
from compactor.local.cache import LocalState
from compactor.tier.kinds import read_only_error, tier_kind


@dataclass(frozen=True)
class TierIdentity:
    """Reads, creates and checks the identity of one tier."""

    settings: Settings
    ports: Ports
    catalog: CatalogLog
    ownership: Ownership
    metadata: TierMetadata
    local: LocalState | None

    def read(self) -> CatalogState:
        """Return the folded catalog. Raises UsageError if there is no tier at this URL, or if it is another one."""
        if (recorded := self.metadata.recorded_catalog()) is not None:
            return recorded
        local = self.local
        kept = local.catalog() if local and not local.bound else None
        if kept:
            self.catalog.load(kept.state, kept.mark)
        state = self.catalog.refresh()
        if not state.tier_id and self.metadata.exists_elsewhere:
            return state  # an identity is needed only by a process that writes into the control store
        if not state.tier_id:
            self.catalog.refresh_and_check_gaps()
            self.ownership.check(self.ports, state)
            self.ownership.require_no_foreign_objects(self.ports)
            raise UsageError(
                f"there is no tier at {self.ports.layout.url} yet", hint="`import` makes one; check tier.url in the configuration"
            )
        self.ownership.tier_id = state.tier_id
        self._check_foreign(state)
        if local:
            if not local.bound:
                local.bind(state.tier_id, diverged=self.catalog.diverged or (kept is not None and state.slot < kept.state.slot))
            local.keep_catalog(state, self.catalog.mark())
        return state

    def create(self, hash_key: bytes = b"") -> CatalogState:
        """Create the tier's identity if there is none, and return the folded catalog.

        :param hash_key: the secret of the new tier; a random one if empty.
        :raises UsageError: the data is another tier's, or the tier is only read.
        """
        tier = self.settings.tier
        if not tier_kind(self.settings).compacts:
            raise read_only_error(self.settings)
        self._check_free()
        url = "" if self.ownership.ours else self.settings.tier_url
        cluster_id = self.metadata.cluster_id()
        state = create_tier(self.ports, kind=tier.kind, layout=tier.layout, url=url, cluster_id=cluster_id, hash_key=hash_key)
        self.ownership.tier_id = state.tier_id
        self._check_foreign(state)
        self.ports.require_ownership(anew=True)
        return state

    def _check_free(self) -> None:
        if not self.catalog.refresh().tier_id:
            self.ownership.require_free_root(self.ports, self.catalog.refresh_and_check_gaps())

    def check_location(self) -> None:
        """Raise UsageError if neither this tier lies here nor a new one may be made, such as over one whose catalog is lost.

        Changes nothing.
        """
        self._check_free()
        if self.catalog.state.tier_id:
            self.check_owner()

    def check_owner(self) -> None:
        """Raise UsageError if the data root is another tier's. Changes nothing."""
        self.ownership.check(self.ports, self.read())

    def _check_foreign(self, state: CatalogState) -> None:
        """Raise UsageError if the catalog is that of another tier."""
        tier = self.settings.tier
        if (state.kind, state.layout) != (tier.kind, tier.layout):
            raise UsageError(
                f"the tier at {self.ports.layout.url} is of kind {state.kind} and layout {state.layout}, not {tier.kind} and {tier.layout}",
                hint="Nothing was changed. Correct tier.kind and tier.layout in the configuration",
            )
        problem = foreign_problem(state, self.settings.tier_url, self.metadata.cluster_id() if state.cluster_id else "")
        if problem:
            raise UsageError(
                f"the control store {self.ports.control.url} belongs to another tier: {problem}",
                hint="Nothing was changed. Correct tier.url or tier.control_url: each tier needs a control store of its own",
            )

    def hash_key(self) -> bytes:
        """Return the tier's secret SipHash key, 16 bytes; it never changes. Raises UsageError if the tier has none."""
        if not tier_kind(self.settings).compacts:
            raise read_only_error(self.settings)
        known = self.catalog.state
        found = known if known.tier_id else self.read()
        if not found.hash_key:
            raise UsageError(
                f"nothing was ever written for the tier at {self.ports.layout.url} into the control store",
                hint="Set control_url under [tier] to where it lies; `bloom rebuild` begins one",
            )
        return bytes.fromhex(found.hash_key)

    def has_hash_key(self) -> bool:
        """Return whether the tier may have hashes under a key of its own. Makes a request only if others made the tier."""
        return tier_kind(self.settings).compacts and (not self.metadata.exists_elsewhere or bool(self.read().hash_key))

    def reading_key(self) -> bytes:
        """Return a key for hashes that are not stored: the tier's own, else one that all readers of this tier derive alike."""
        return self.hash_key() if self.has_hash_key() else hashlib.sha256(self.settings.tier_url.encode()).digest()[:HASH_KEY_BYTES]
