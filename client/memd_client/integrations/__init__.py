"""Other libraries' training loops with memd: one module a library, imported only on demand, because
each imports its library.

    from memd_client.integrations.transformers import CommittedTrainer
"""
