"""Three small chat templates with the habits that break loss masks, and a tokenizer to render them for.

A forgets reasoning before the last user turn and writes a think block on every later answer; B does the same
and opens the block in the generation prompt; C wants user and assistant to alternate and has no end-of-turn
token. R drops reasoning from finished answers although its prompt opens a think block.
"""

from drafthead.data.template import Template
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

_CHATML = """
{%- set turns = namespace(last_user=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set turns.last_user = loop.index0 %}{% endif %}
{%- endfor %}
{%- if tools %}{{ '<|im_start|>system\\nTools: ' ~ (tools | tojson) ~ '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set thought = message.reasoning_content or '' %}
        {%- set said = message.content or '' %}
        {%- if '</think>' in said %}
            {%- set thought = said.split('</think>')[0].split('<think>')[-1].strip() %}
            {%- set said = said.split('</think>')[-1].lstrip() %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > turns.last_user %}{{ '<think>\\n' ~ thought ~ '\\n</think>\\n\\n' }}{% endif %}
        {{- said }}
        {%- for call in message.tool_calls or [] %}
            {%- set given = call.function.arguments %}
            {{- '\\n<tool_call>\\n' ~ call.function.name ~ ' ' }}
            {{- given if given is string else given | tojson }}
            {{- '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' ~ message.content ~ '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\nOPENING' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""

A = _CHATML.replace("OPENING", "")
B = _CHATML.replace("OPENING", "<think>\\n")
C = """
{%- for message in messages %}
    {%- if (loop.index0 is even) != (message.role == 'user') %}
        {{- raise_exception('roles must alternate user/assistant') }}
    {%- endif %}
    {{- '[' ~ message.role ~ ']' ~ message.content ~ '[/]' }}
{%- endfor %}"""
R = """
{%- for message in messages %}
    {{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content.split('</think>')[-1] ~ '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' ~ (opening or '') }}{% endif %}"""

TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with 256 single bytes, a few merges, chat tokens; `<|im_end|>` is the end of turn."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["the weather in Oslo\n\nassistant user\n\n" * 3], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    fast.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    return fast


TOKENIZER = make_tokenizer()


def make_template(text: str, **template_kwargs: object) -> Template:
    return Template(TOKENIZER, target="tiny", chat_template=text, template_kwargs=template_kwargs)
