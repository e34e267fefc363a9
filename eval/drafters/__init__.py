"""Drafters without a trained head: each implements `eval.protocols.Drafter`."""
