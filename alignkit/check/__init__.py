"""`alignkit check`: logprobs of real engines, each in its own process, compared before and after patching."""
