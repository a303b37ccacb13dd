"""An engine behind HTTP on this machine alone: OpenAI chat, Anthropic messages, and token ids in and out.

How the parts are put together (training does the same, with one token for each episode):

    with EngineThread(engine, seed=("serve",)) as sampler, Endpoint(sampler, chat, model="mine", context=4096) as endpoint:
        endpoint.admit(token, key)     # from now on requests with this bearer token belong to `key`
        ...                            # clients speak to endpoint.address, such as http://127.0.0.1:41233
        endpoint.withdraw(token)       # its running requests are cancelled, later ones get 401, its conversations are forgotten

`Sampler` and `ClientRequest` are in `lockstep.types`. Code that records what was sampled puts a Sampler of its own between the
two: each reply passes through `sample`, with its key, its exact prompt ids, sampled ids and log-probabilities.
"""
