"""The process beside the training: store I/O, uploads, the lease, and what a start needs.

One process for each node of each attempt, started with ``python -m envscaler_airflow.sidecar``. It and the
wrapper in the training container exchange files in one folder (:mod:`envscaler_agent.spool`). The process may
be killed and restarted at any line: its state is in that folder and in the store.

- :mod:`.setup`: workdir, inputs, and the checkpoint to resume from; then ``start.json``.
- :mod:`.loop`: the rounds of a running attempt, and the end.
- :mod:`.owner_watch`: control and lease; :mod:`.uploads`: chunks, checkpoints, outputs.
- :mod:`.snapshots`, :mod:`.saver_layouts`: checkpoints of code that does not import the library.
"""
