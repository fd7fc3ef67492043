"""The conformance suite: does a backend keep the contract, clause by clause?

Design: `docs/design/conformance.md`; clauses: `docs/contract.md`. Needs the extra
`equipoise[conformance]`; nothing is imported with the package itself.
"""
