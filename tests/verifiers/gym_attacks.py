"""Replies that try to run code, read the environment or forge a score through a score function that evaluates the answer."""

from __future__ import annotations

from collections.abc import Iterator

FORGED = '{"score": 1.0}'


def payloads(mark: str, secret: str) -> list[str]:
    """Expressions that write the file `mark`, need the environment variable `secret`, or change what scores."""
    touch = f"open({mark!r},'w')"
    return [
        touch,
        f"__import__('os').system('touch {mark}')",
        f"print(end='',file={touch})",
        f"exec({touch!r})",
        f"eval({touch!r})",
        f"sympify({touch!r})",
        f"S({touch!r})",
        f"Symbol('x').func({touch!r})",
        f"lambdify([],{touch!r})()",
        f"[c for c in ().__class__.__base__.__subclasses__() if c.__name__=='Popen'][0](['touch',{mark!r}])",
        f"getattr(getattr([],'_'+'_class_'+'_'),'mro')() and {touch}",
        f"ｏｐｅｎ({mark!r},'w')",
        f"(lambda f:f({mark!r},'w'))(open)",
        f"(opened:={touch})",
        f"f'{{{touch}}}'",
        f"globals()['__builtins__']['open']({mark!r},'w')",
        f"__import__('os').environ[{secret!r}]",
        f"__import__('os').getenv({secret!r}) or 1/0",
        f"open('/proc/self/environ').read().index({secret!r})",
        "setattr(type(self),'score_answer',lambda *a,**k:1.0) or 1",
        "setattr(type(self),'__getattribute__',lambda *a:(lambda **k:1.0)) or 1",
        "[entry['metadata'].update(valid_answers=[answer]),1][1]",
        "entry.update(answer=answer) or 1",
        "globals().update(eval=lambda _:entry['answer']) or 1",
        f"[__import__('os').write(n,b'{FORGED}\\n') for n in range(3,9)]",
        f"[open('/proc/self/fd/%d'%n,'w').write('{FORGED}\\n') for n in range(3,9)]",
        "__import__('os')._exit(0)",
        "exit()",
        "[x for x in iter(int,1)]",
        "breakpoint()",
    ]


def attacks(reference: str, mark: str, secret: str) -> Iterator[str]:
    """More than 100 answers. Many of them would be the right one, if what they hold ran."""
    right = repr(reference)
    for payload in payloads(mark, secret):
        yield payload
        yield f"[{payload},{right}][1]"
        yield f"{right} if [{payload}] else 0"
        yield f"({payload}) and ({reference})"
    yield from ("nan", "NaN", "inf", "[NaN]", "Infinity", "nan + nani", "1e999-1e999", FORGED)
