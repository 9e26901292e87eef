"""A decoder from outside transformers, as checkpoints bring them along. Its initialisation writes in place, as such
code often does.
"""

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast


class CustomDecoderConfig(PreTrainedConfig):
    model_type = "custom_decoder"

    vocab_size: int = 96
    hidden_size: int = 32
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    intermediate_size: int = 64
    tie_word_embeddings: bool = False


class CustomDecoderLayer(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.heads, self.layer_idx = config.num_attention_heads, layer_idx
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.out = nn.Linear(config.hidden_size, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size)

    def forward(self, hidden_states, past_key_values=None, **kwargs):
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm(hidden_states)).chunk(3, dim=-1)
        )
        past = 0
        if past_key_values is not None:
            past = past_key_values.get_seq_length(self.layer_idx)
            key, value = past_key_values.update(key, value, self.layer_idx)
        causal = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(past)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=causal)
        return hidden_states + self.out(attended.transpose(1, 2).flatten(2))


class CustomDecoderPreTrainedModel(PreTrainedModel):
    config_class = CustomDecoderConfig
    base_model_prefix = "model"
    _supports_sdpa = True

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight.data.normal_(mean=0.0, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            module.bias.data.zero_()
        elif isinstance(module, nn.LayerNorm):
            module.weight.data.fill_(1.0)
            module.bias.data.zero_()


class CustomDecoderModel(CustomDecoderPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([CustomDecoderLayer(config, index) for index in range(config.num_hidden_layers)])
        self.norm = nn.LayerNorm(config.hidden_size)
        self.post_init()

    def forward(self, input_ids=None, past_key_values=None, inputs_embeds=None, use_cache=None, **kwargs):
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache()
        for layer in self.layers:
            hidden_states = layer(hidden_states, past_key_values=past_key_values, **kwargs)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states), past_key_values=past_key_values)


class CustomDecoderForCausalLM(CustomDecoderPreTrainedModel, GenerationMixin):
    def __init__(self, config):
        super().__init__(config)
        self.model = CustomDecoderModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        labels=None,
        use_cache=None,
        **kwargs,
    ):
        outputs = self.model(
            input_ids, past_key_values=past_key_values, inputs_embeds=inputs_embeds, use_cache=use_cache, **kwargs
        )
        logits = self.lm_head(outputs.last_hidden_state)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=outputs.past_key_values)
