"""Clusters: where training really runs, and how to watch it there (lab 15).

Read job.py, then the files on your question:
    jobs      sbatch.py, manifest.py, storage.py, systems.py (what was run where)
    networks  nccl.py (the settings), nccl_log.py (what NCCL did), acceptance.py (every pair)
    watching  exporter.py, rules.py; promql.py and alerts.py (a rule, evaluated), promtool.py;
              monitor.py (real servers), poller.py; stories.py, recordings.py, alarm.py
    a cluster inside this machine  hosts.py, slurm.py
"""

__all__ = [
    "acceptance", "alarm", "alerts", "curves", "exporter", "hosts", "job", "manifest", "monitor",
    "nccl",
    "nccl_log", "poller", "promql", "promtool", "recordings", "rules", "sbatch", "slurm", "storage",
    "stories", "systems", "webhook",
]
