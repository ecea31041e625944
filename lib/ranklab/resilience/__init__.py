"""Resilience: a run goes on, though its machines fail.

    heartbeat.py   ranks that no longer do steps are noticed, and ended
    peers.py       the same by torch: DCP's async_save, torch elastic
"""
