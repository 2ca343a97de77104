"""Continuing text with a trained checkpoint: load it, choose tokens, print them as they come.

Used by tools/generate.py, in this order:

    with open_checkpoint(find_checkpoint(folder), host) as loaded:      # checkpoint_location, checkpoint_model
        decoder = make_decoder(loaded.model, length, cached=True)       # decoder
        run = Continuation(decoder, Sampler(sampling, seed), limits)    # continuation, sampler
        for choice in run.tokens(prompt_ids):
            print(stream.add(choice.token))                             # token_stream

Importing this package alone imports nothing further of ours; every module names its own needs.
"""
