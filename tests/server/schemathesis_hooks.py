"""A hook of schemathesis: at most two short answers to a request and no deadline, so that most requests reach the model."""

import schemathesis

MOST_TOKENS, MOST_ANSWERS = 2, 2


@schemathesis.hook
def before_call(context, case, kwargs):
    deadline_ms = (case.headers or {}).get("x-deadline-ms", "")
    if str(deadline_ms).isdecimal():
        del case.headers["x-deadline-ms"]
    path = case.operation.path
    if not isinstance(case.body, dict) or "token" in path:  # nothing is generated
        return
    limit = "max_output_tokens" if "responses" in path else "max_tokens"
    body = {limit: None} | case.body
    for name, most in ((limit, MOST_TOKENS), ("max_completion_tokens", MOST_TOKENS), ("n", MOST_ANSWERS)):
        if name in body and (body[name] is None or isinstance(body[name], int)):
            body[name] = min(most, most if body[name] is None else body[name])
    case.body = body
