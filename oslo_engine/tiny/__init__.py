"""Tiny models of any architecture, weights and batches that hide no mistake: what proofs and derivations work on."""
