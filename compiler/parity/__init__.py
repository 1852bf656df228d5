"""The gate: cases, references, comparison, verdicts, proofs."""
