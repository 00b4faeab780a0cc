"""The guards: small state machines, events in, findings and repair requests out. One file a guard."""
