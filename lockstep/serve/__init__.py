"""Serves an engine over HTTP, on this machine only: OpenAI chat, Anthropic messages, and token ids in and out.

How to use the parts (training does the same, with one bearer token for each episode):

    with EngineThread(engine, seed=("serve",)) as sampler, Endpoint(sampler, chat, model="mine", context=4096) as endpoint:
        endpoint.admit(token, key)     # from now on requests with this bearer token belong to `key`
        ...                            # clients speak to endpoint.address, such as http://127.0.0.1:41233
        endpoint.withdraw(token)       # its running requests are cancelled, later ones get 401, its conversations are forgotten

`Sampler` and `ClientRequest` are in `lockstep.types`. To record what was sampled, put a Sampler of your own between the two:
each reply passes through its `sample`, with the key, the exact prompt ids, the sampled ids and their log-probabilities.
"""
