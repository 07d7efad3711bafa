# Pinned versions of what the build itself needs; sourced by the scripts.
BUN_VERSION=1.4.5
