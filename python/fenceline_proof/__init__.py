"""The ordering proof's parts: workloads, runs, schedules, arms, table. The command is ``fenceline_proof.prove``."""
