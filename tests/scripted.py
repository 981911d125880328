"""A model that says what it is told to, in passes of any size, under templates of three formats."""

import dataclasses

from tokenizers import AddedToken

from ar2diff.engine.answer import Answer
from ar2diff.engine.generation import Generation, Pass, Reveal
from ar2diff.testing.models import END_ID, byte_tokenizer, tiny_diffusion, tiny_model
from ar2diff.tokenizer import Tokenizer

_CALLS = {
    "hermes": """<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>""",
    "minicpm5": """<function name="{{ c.function.name }}">{% for k, v in c.function.arguments.items() %}\
<param name="{{ k }}">{% if v is string and '<' in v %}<![CDATA[{{ v }}]]>{% else %}{{ v }}{% endif %}</param>\
{% endfor %}</function>""",
    "llama3": """{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}""",
}
_TEMPLATE = """{% for t in tools or [] %}{{ t | tojson(ensure_ascii=False) }}
{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}\
{% for c in m.tool_calls or [] %}
CALL{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined %}<think>
{% if not enable_thinking %}
</think>

{% endif %}{% endif %}{% endif %}"""
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<function", "</function>", "<param", "</param>")
MODEL = tiny_model(3, diffusion=tiny_diffusion(), vocab_size=300, max_seq_len=2048)


def make_tokenizer(name, *, has_tags=False):
    """The byte tokenizer with a format's template; with tags, the formats' markers are control tokens."""
    backend = byte_tokenizer()._backend
    if has_tags:
        backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in TAGS])
    template = _TEMPLATE.replace("CALL", _CALLS[name])
    return Tokenizer(backend, eos_token_ids=[END_ID], chat_template=template, config={"eos_token": "<|im_end|>"})


class ScriptedEngine:
    """Says one text for each choice, cut into passes of `step` tokens."""

    def __init__(self, name, *texts, step=3, has_tags=False):
        self.tokenizer = make_tokenizer(name, has_tags=has_tags)
        self.loaded = dataclasses.replace(MODEL, tokenizer=self.tokenizer)
        self.texts, self.step_len, self.capacity = list(texts), step, 8
        self.running, self.requests = {}, []

    @property
    def scheduler(self):
        return self

    def add(self, key, request):
        text = self.texts[len(self.requests) % len(self.texts)]
        self.requests.append(request)
        ids = [*self.tokenizer.encode(text, parse_special=True), END_ID]
        self.running[key] = (Answer(request, self.tokenizer, max_seq_len=10_000), ids)

    def remove(self, key):
        self.running.pop(key, None)

    def stream(self, request):
        """One answer, as an engine called directly gives it."""
        self.add("alone", request)
        while "alone" in self.running:
            yield self.advance("alone", *self.running["alone"])

    def step(self):
        return [(key, self.advance(key, *running)) for key, running in list(self.running.items())]

    def advance(self, key, answer, ids):
        before, text, said = len(answer.settled), "", []
        for _ in range(self.step_len):
            if not answer.is_finished:
                said.append(Reveal(position=before + len(said), token_id=ids.pop(0), logprob=-0.5))
                text += answer.push(said[-1])
        fields = {
            "block_idx": before // self.step_len,
            "pass_idx": 0,
            "start": before,
            "token_ids": tuple(reveal.token_id for reveal in said),
            "reveals": tuple(said),
        }
        generation = None
        if answer.is_finished:
            del self.running[key]
            generation = Generation(
                token_ids=tuple(answer.token_ids),
                text=answer.text,
                finish_reason=answer.finish_reason,
                logprobs=(-0.5,) * len(answer.token_ids),
                num_forward_passes=1,
                num_prefill_passes=0,
                passes_per_block=(1,),
                drafted_by_offset=(),
                accepted_by_offset=(),
                prefill_s=0.0,
                decode_s=0.0,
            )
        return Pass(**fields, text=text, settled=tuple(answer.settled[before:]), generation=generation)
