"""Whether a split checkpoint was saved with the policy, as it is now, that it is used with.

A checkpoint says itself what stands where, so another policy does no harm to reading it. But who changed a policy between two
runs, or has another version of it installed, trains something else from here on, and should hear of it.
"""

from __future__ import annotations

import hashlib
import json
import logging

from oslo_engine.checkpoint.split import SplitSource
from oslo_engine.checkpoint.tensors import TensorSource
from oslo_engine.policy.schema import Policy

logger = logging.getLogger(__name__)


def hash_of_policy(policy: Policy | None) -> str:
    """A short hash of what a policy says; empty for none."""
    if policy is None:
        return ""
    words = json.dumps(policy.model_dump(mode="json", exclude_defaults=True), sort_keys=True)
    return hashlib.blake2b(words.encode(), digest_size=6).hexdigest()


def warn_of_another_policy(source: TensorSource, policy_hash: str) -> None:
    """Log a warning where a split checkpoint was saved with another policy than the one of this hash."""
    if not isinstance(source, SplitSource) or not policy_hash:
        return
    saved = source.layout.policy_hash
    if saved and saved != policy_hash:
        logger.warning(
            "%s was saved with policy %s as it then was (hash %s); the one used now has hash %s",
            source.folder,
            source.layout.policy,
            saved,
            policy_hash,
        )
