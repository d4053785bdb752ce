// A decoder as a list of layers, to run all layers of a step in one call.
#pragma once
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "lora.h"
#include "lossy_routing.h"
#include "key_choice.h"
#include "divided_rows.h"
#include "native_weight.h"
#include "rank_group.h"
#include "argmax_prefilter.h"
#include "tables.h"

namespace quire {

// Floats from one row of a step's memory to the next: an odd number of cache lines, so that equal places of many rows do not
// compete for the same few lines of a cache.
static inline i64 row_stride(i64 size) { return (size + 31) / 32 * 32 + 16; }

// Words from one thread's packed row to the next thread's: whole pairs of cache lines.
static inline i64 own_stride(i64 size) { return (size + 31) / 32 * 32; }

struct Norm {
    bool is_present = false;
    NormJob job;
    std::vector<float> weight, bias;

    // num_heads: consecutive norms of `size` values, each with its own weight.
    void set(bool is_layer_norm, i32 size, float eps, uintptr_t weight_address, uintptr_t bias_address, i32 num_heads);
};

// One form of packed input, shared by weights that read the same rows in the same form.
struct InputForm {
    Format kind;
    i32 k, group, input_group;
    const i32* columns;
};

// A place where rows are packed for one or more weights.
struct Site {
    std::vector<InputForm> forms;

    // Return the index of the form that a weight reads.
    i32 add(const Weight& weight);
};

struct Expert {
    std::shared_ptr<NativeWeight> gate, up, down;
};

// The initial rows of a step. token: embeddings. joined: fuse(concat(embedding, features)), both normed. beside: the features,
// projected by fuse if they are wider than the model; the first attention then reads the normed embedding
// concatenated with them. Multi-token prediction and EAGLE-1 are joined, EAGLE-3 is beside.
enum class Entry : i32 { token, joined, beside };

// Multi-head latent attention (https://arxiv.org/abs/2405.04434), absorbed: all heads read one cached row of `rope` rotated values and
// then `rank` values, which is key and value. Heads of q have nope values, brought to the latter's space by key_up, and then rope ones.
struct LatentHead {
    std::shared_ptr<NativeWeight> key_up, value_up;  // [rank][nope], [value][rank]
};
// What chooses the keys that a query attends to, the best top_k of all before it, by keys of its own (IndexerSpec). Every rank has all of it.
struct KeyIndexer {
    i32 num_heads = 0, head_dim = 0, top_k = 0;  // top_k 0: there is none; without weights: the choice of the last indexer before it
    bool is_interleaved = false;                 // as in Latent
    std::shared_ptr<NativeWeight> q, k, weights;  // of what queries are made of, and of the input
    Norm k_norm;
    i32 q_form = 0, k_form = 0, weights_form = 0;  // derived
};
struct Latent {
    i32 rank = 0, nope = 0, rope = 0, value = 0;  // rank 0: the layer has none
    bool is_interleaved = false;                  // rotated pairs are adjacent: they are split first
    std::shared_ptr<NativeWeight> q_a;            // before q, or null
    Norm q_norm, kv_norm;
    std::vector<LatentHead> heads;
    KeyIndexer indexer;
};

// A mixture whose experts are a branch of their own next to the shared expert; see MoeSpec.branch_norm. shared_out present: it is one.
struct ExpertBranch {
    Norm router_in, experts_in, experts_out, shared_out;
};

// What a layer does with several residual streams (alternating updates, https://arxiv.org/abs/2301.13310), of which it computes the active one:
// before it all are predicted from all, after it corrected by its output, with coefficients that the router makes of the active one.
// A residual of low rank stands next to its attention (https://arxiv.org/abs/2411.07501), and per-layer inputs are added to all streams
// but the first. See AltUpSpec and LaurelSpec.
struct LayerStreams {
    std::shared_ptr<NativeWeight> router, laurel_left, laurel_right;  // null: there is one stream
    Norm norm, laurel_norm;
    std::vector<float> predict, correct, scale;  // [count * count][count], [count][count]; of what the per-layer gate reads [hidden], or none
    Site router_site, left_site, right_site;     // derived
};

// What has a recurrent state in the place of attention (contracts/mixer_spec.py), or a rank's part of it: some heads of the state, or, of a
// short convolution and of Mamba 1, some channels.
enum class MixerKind : i32 { delta, short_conv, mamba2, mamba1 };

struct Mixer {
    MixerKind kind = MixerKind::delta;
    // The state: v_heads / k_heads heads share a key. Mamba 1 has one head, whose v_dim are its channels; a short convolution only these.
    i32 k_heads = 1, v_heads = 1, k_dim = 1, v_dim = 1, taps = 2;
    // Of the outputs, and of Mamba 1's convolved inputs: where this rank's begin, and how many all ranks have.
    i32 first_value = 0, total_values = 0;
    // What the input is projected to, part after part. delta: q, k, v, z, b, a, or, with low_z and low_a, what these read in the place of z
    // and a. short_conv: b, c, x. mamba2: x, B, C, z, steps. mamba1: x, z.
    std::vector<std::shared_ptr<NativeWeight>> in;
    std::vector<float> part_scales;                          // of each of these parts, or none
    std::shared_ptr<NativeWeight> out;
    std::shared_ptr<NativeWeight> low_z, low_a;              // of delta, or null
    std::shared_ptr<NativeWeight> read, step_up;             // of mamba1: x to steps, B and C; steps to channels
    std::vector<float> conv_weight, conv_bias;               // [taps][channels], and [channels] or none
    std::vector<float> step, rates, skip;                    // biases of steps, which step_up has itself; decay is exp(rates * step); of mamba1 [k_dim][v_dim]
    Norm norm, step_norm, b_norm, c_norm;                    // of outputs: of a head of delta, or of a group of mamba2; of mamba1
    std::vector<float> norm_weight;                          // of all groups of mamba2, [total_values]
    bool is_gate_first = true;                               // the output of mamba2 is normed after its gate
    float min_step = 0.0f, max_step = 0.0f;
    float write_scale = 1.0f;                                // multiplies the beta of delta
    // The memory of the states: rows of conv_bytes, and of state_size values.
    u8* conv_states = nullptr;
    float* states = nullptr;
    bool is_bf16 = false;
    // Derived.
    Site low_z_site, low_a_site, read_site, step_site, out_site;
    std::vector<i32> in_forms, offsets;  // of each part of `in`, and of its outputs in a row; one more: the size of the row
    Norm q_norm, k_norm;

    i32 values() const { return v_heads * v_dim; }
    // What the convolution is over; it comes first in a row.
    i32 channels() const { return kind == MixerKind::delta || kind == MixerKind::mamba2 ? 2 * k_heads * k_dim + values() : values(); }
    i64 conv_bytes() const { return static_cast<i64>(taps - 1) * channels() * (is_bf16 ? 2 : 4); }
    i64 state_size() const { return static_cast<i64>(v_heads) * k_dim * v_dim; }
    i32 num_decays() const { return kind == MixerKind::mamba1 ? v_dim : low_a ? v_heads * k_dim : v_heads; }
    bool has_group_norm() const { return kind == MixerKind::mamba2 && norm.is_present; }
    // The values of a row that ranks share.
    i32 shared_size() const { return kind == MixerKind::mamba1 || (has_group_norm() && !is_gate_first) ? 2 * total_values : total_values; }
};

// A block of attention and a feed-forward block before a mixer (SharedBlockSpec). It reads the residual beside the embeddings; `out`
// projects its result, and the mixer reads the sum of that and the residual. Linear layers may have low-rank adapters of the layer.
struct BlockAdapter {
    std::shared_ptr<NativeWeight> in, out;  // null: there is none
    i32 in_form = 0;                        // derived
    Site out_site;
};
struct SharedBlock {
    std::shared_ptr<NativeWeight> out;  // null: the layer has no block
    BlockAdapter q, k, v, gate, up;     // of gate and up always, of the others all or none
    Site out_site;                      // derived
};

struct PlanLayer {
    Norm attn_in, attn_out, mlp_in, mlp_out, q_norm, k_norm, v_norm;
    std::shared_ptr<NativeWeight> q, k, v, o, gate, up, down, router;  // k and v null: the cache is that of an earlier layer
    std::shared_ptr<NativeWeight> attn_gate;                            // whose sigmoid multiplies the results of attention, or null
    // In the place of attention, or next to it: then it reads the residual under a norm of its own. Null: there is none.
    std::shared_ptr<Mixer> mixer;
    Norm mixer_in;
    SharedBlock block;
    std::vector<Expert> experts;
    // What projects the input of the experts to a latent row, and the sum of their results back; the first one every rank has whole. Null: they
    // read the input.
    std::shared_ptr<NativeWeight> latent_in, latent_out;
    // The shared expert, which every token gets in addition to the chosen ones, times the sigmoid of shared_scale's output if there
    // is one.
    std::shared_ptr<NativeWeight> shared_gate, shared_up, shared_down, shared_scale;
    // What the per-layer inputs go through after the feed-forward block, see PerLayerGate; null: there are none.
    std::shared_ptr<NativeWeight> per_layer_gate, per_layer_up;
    Norm per_layer_norm;
    float output_scale = 1.0f;  // multiplies the residual after the layer, whose last result must be that of experts, or one that waits (waiting_last)
    i32 index = 0;              // in the model
    bool is_windowed = false;   // its keys and values are in the blocks of StepInput::window, see KvSpec
    Latent latent;  // k is then the projection to rank + rope values, v is null
    i32 num_heads = 1, num_kv_heads = 1, head_dim = 2, window = 0, rope = -1, rope_dim = 0;
    float scale = 1.0f, softcap = 0.0f, residual_scale = 1.0f;
    float attention_out_scale = 1.0f, mixer_out_scale = 1.0f, gate_scale = 1.0f, down_scale = 1.0f;  // see LayerSpec and MlpSpec
    bool is_qk_norm_whole = false, is_qk_norm_each = false, is_qk_norm_last = false;  // see AttentionSpec
    bool has_head_gate = false;    // attn_gate has one output a head, whose softplus multiplies the head
    bool is_parallel = false;      // both blocks read the same residual
    float clip = 0.0f;             // of q, k and v; 0: none
    float query_beta = 0.0f;       // of the factor on queries by their position; 0: none
    i64 query_max = 1, query_offset = 0;
    float positive = 0.0f, negative = 0.0f;  // the numbers of xielu
    bool is_sparse = false;                  // the gate is cut at this many standard deviations above its mean before the activation
    float sparse_quantile = 0.0f;
    LayerStreams streams;
    Activation activation = Activation::silu;
    float gate_limit = 0.0f, gate_slope = 1.0f;  // of a clamped gate, see LinearJob
    std::vector<float> sinks, slopes;            // [num_heads], or none; slopes: of ALiBi
    i32 value_dim = 0;                           // of a value, 0: head_dim; the cache has zeros after smaller ones
    float value_scale = 1.0f;                    // multiplies values
    bool is_expert_gated = true;
    i32 top_k = 0;
    bool is_renormalized = true;
    Routing routing;
    bool weighs_inputs = false;  // the weights of experts multiply their inputs, not their outputs
    std::vector<float> expert_scale;  // multiplies the weight of each expert in the end; or none
    ExpertBranch branch;
    // With expert parallelism, of each expert: how many ranks hold it, and which of these this rank is, -1 if it does not. The others'
    // weights are null. Empty: every rank has all experts, or a shard of each.
    std::vector<i32> expert_copies, own_copies;
    // Of a rank of several, which has a shard of the layer: where its heads and outputs begin, and how many all ranks have together
    // (0: as many as this one). first_output: of the weights whose results join the residual, o and down;
    // first_o_output: of o only, where that differs; first_expert_output: of the experts' down, likewise.
    i32 first_head = 0, first_kv_head = 0, first_inner = 0, first_output = 0, first_o_output = 0, first_expert_output = 0, total_heads = 0, total_kv_heads = 0, total_inner = 0;
    i32 first_shared_inner = 0, total_shared_inner = 0;
    // With decode context parallelism: the heads of all ranks that share the tokens of sequences, which is what the cache of each of them
    // has (0: only the rank's own), and whether this rank is the one that writes its key and value heads for the others.
    i32 first_context_head = 0, num_context_heads = 0, first_context_kv_head = 0, num_context_kv_heads = 0;
    bool writes_kv_heads = true;
    KvLayer kv;  // with an indexer see indexed_kv

    // The size of a value, and of what attention gives of a head.
    i32 value_size() const { return value_dim > 0 ? value_dim : head_dim; }
    bool has_plain_values() const { return value_size() == head_dim && value_scale == 1.0f; }
    // The heads whose attention is computed with `kv`.
    i32 attended_heads() const { return num_context_heads > 0 ? num_context_heads : num_heads; }
    bool has_attention() const { return q != nullptr; }
    bool has_indexer() const { return latent.indexer.q != nullptr; }
    bool attends_chosen() const { return latent.indexer.top_k > 0; }
    // The cache with an indexer: `keys` are the rows, and `values` the indexer's keys.
    IndexedKv indexed_kv() const { return {kv.format, kv.block_size, head_dim, latent.indexer.head_dim, kv.keys, kv.values}; }
    bool is_mixed() const { return q != nullptr && mixer != nullptr; }
    // What multiplies a block's result as it joins the residual.
    float attention_scale() const { return residual_scale * attention_out_scale; }
    float mixer_scale() const { return residual_scale * mixer_out_scale; }
    float last_scale() const { return has_mlp() ? residual_scale * down_scale : mixer ? mixer_scale() : attention_scale(); }
    Site& mixer_site() { return is_mixed() ? beside_site : attn_site; }
    const Site& mixer_site() const { return is_mixed() ? beside_site : attn_site; }
    bool is_mlp_only() const { return q == nullptr && mixer == nullptr; }
    bool has_block() const { return block.out != nullptr; }
    // After attention or the mixer; that of a block comes before.
    bool has_mlp() const { return (down != nullptr || router != nullptr) && !has_block(); }
    bool has_streams() const { return streams.router != nullptr; }
    bool has_branch() const { return branch.shared_out.is_present; }
    i32 cached_heads() const { return num_context_heads > 0 ? num_context_kv_heads : num_kv_heads; }
    // Derived when the plan is finished: the form of each weight at its site.
    Site attn_site, beside_site, o_site, mlp_site, router_site, expert_site, down_site, shared_site, latent_site, q_site, key_up_site, value_up_site, per_layer_site, per_layer_up_site;
    i32 q_form = 0, k_form = 0, v_form = 0, o_form = 0, gate_form = 0, up_form = 0, down_form = 0, router_form = 0;
    i32 attn_gate_form = 0, q_a_form = 0, latent_in_form = 0, shared_gate_form = 0, shared_up_form = 0, shared_scale_form = 0;
};

// Tokens that follow a step, each the most likely one after the earlier ones, with the features of the previous row.
// Sequence s gets counts[s] of them, at least one; what stands behind these is of no use. Its block table has room for
// counts[s] - 1 tokens more. They end before the first with which all of them together are less likely than least_share, as is said
// here; all that are computed of a sequence behind that are of no use either.
struct DraftRun {
    i32 num_drafts = 0;  // the most of any
    const i32* counts = nullptr;
    const i32* vocabulary = nullptr;  // the embedding's row of each output, or null: the same
    i64* tokens = nullptr;  // [num_sequences][num_drafts]
    float least_share = 0;
    i32* num_kept = nullptr;  // [num_sequences] out: tokens before the end
};

// The best token of each of some rows of logits, the lowest of equal ones; -1 if a row has none (NaN, or infinite).
void best_tokens(const Kernels& kernels, const float* logits, i64 stride, i32 num_rows, i32 vocab, int num_threads, i32* tokens);

class Plan {
public:
    Plan(const Kernels& table, i32 hidden, i32 vocab, bool is_bf16, int num_threads);

    void set_embedding(std::shared_ptr<NativeWeight> embed, std::shared_ptr<NativeWeight> positions, float scale);
    // Give every layer inputs of `size` values of each token, see PerLayerInputs: embed [any rows][layers * size], projection
    // [layers * size][hidden]. The scales multiply embeddings, projections and in the end their sum; per_layer_norm is of the projections.
    void set_per_layer_inputs(std::shared_ptr<NativeWeight> embed, std::shared_ptr<NativeWeight> projection, i32 size, float embed_scale, float projection_scale,
                              float sum_scale);
    // Give every layer count >= 2 residual streams, see LayerStreams: the first is the embedding, the others are made of it by `split`
    // [hidden][hidden], and brought back by `join` after the last layer, for the mean.
    void set_streams(i32 active, std::vector<std::shared_ptr<NativeWeight>> split, std::vector<std::shared_ptr<NativeWeight>> join);
    void set_head(std::shared_ptr<NativeWeight> head, float logit_scale, float softcap);
    // Keep an int8 copy of the head, if possible, to exclude most outputs from the argmax (argmax_prefilter.h); return its bytes.
    // Only steps that ask for best tokens alone read it, so where logits are not plain it is of no use.
    i64 make_int8_head();
    void add_layer(std::shared_ptr<PlanLayer> layer);
    // Cosine and sine of rope `index` for positions [0, count): [count][dim / 2] f32 each. The addresses must stay valid.
    void set_angles(i32 index, const float* cosine, const float* sine, i64 count, i32 half);
    // The initial rows: see Entry. is_residual_normed: the residual stream begins with the normed features that attention reads;
    // recycles_normed: the features for the next row are taken after the final norm.
    void set_entry(i32 entry, std::shared_ptr<NativeWeight> fuse, bool is_residual_normed, bool recycles_normed);
    // Make the plan for one rank of several, before finish. first_output: of the rank's rows of embedding and head. The state of
    // the barrier and the open file of shared rows must live as long as the plan.
    void set_rank_group(BarrierState* barrier, int rank, int size, i32 first_output, int file);
    // Let ranks each compute some of the tokens of a step (prefill context parallelism). They have the same weights: the whole model, or,
    // each with a group of its own, the same shard of it (set_rank_group, before this). `barrier` and `file` are those of these ranks only.
    void divide_rows(BarrierState* barrier, int rank, int size, int file);
    // Let groups of num_places consecutive ranks share the tokens of sequences; after set_rank_group. num_local_blocks: of the cache of
    // each; the block tables of steps count those of all of them, see ContextJob.
    void set_context(i32 place, i32 num_places, i32 num_local_blocks);
    // Let each home, of home_size consecutive ranks that divide all heads, have the sequences whose blocks it holds, num_local_blocks of
    // them; after set_rank_group.
    void set_homes(i32 home_size, i32 num_local_blocks);
    // For ranks without shared memory: the exchange at each barrier, see RankGroup::exchange.
    void set_exchange(std::function<bool(u8*, const std::vector<WrittenBlock>&)> exchange);
    bool is_sharded() const { return group_.barrier != nullptr; }
    bool divides_rows() const { return row_group_.barrier != nullptr; }
    bool has_context() const { return group_.num_places > 1; }
    bool has_homes() const { return group_.home_size > 0; }
    bool shards_heads() const { return is_sharded() && !has_homes(); }
    // Whether the logits of a step are computed here: of ranks that divide rows by the first one, which gets the rows of all.
    bool computes_results() const { return row_group_.rank == 0; }
    bool gives_results() const { return computes_results() && group_.rank == 0; }
    // Whether the residual stream is in the rows of the caller: of a pipeline stage, of whose ranks the others have copies.
    bool computes_in_place() const { return is_stage_ && group_.rank == 0; }
    bool is_aborted() const { return group_.is_aborted || row_group_.is_aborted; }
    u64 num_barriers() const { return group_.num_barriers + row_group_.num_barriers; }
    // Say to the other ranks in which layer this rank is, from 1 on; 0: in none.
    void set_layer(u32 layer);
    // Make the plan that of a pipeline stage, before finish: a range of layers, and the embedding or the head only where it is the first
    // or the last stage. Every step needs `rows`; one of a stage that is not the last keeps all of them and has no wanted rows.
    // A stage may be that of several ranks (set_rank_group, before this): `rows` are then the same memory for all of them.
    // first_layer: in the model.
    void set_stage(bool is_first, bool is_last, i32 first_layer);
    // Use the rows of an earlier step of a pipeline stage in the next calls of logits and hidden_states; they are not changed.
    // adapters: the numbers of their adapters, see StepInput; count 0: they have none.
    void use_rows(float* rows, const i32* adapters, i32 count);
    // Set the adapter of a number, after finish; null: the number is free.
    void set_adapter(i32 number, std::shared_ptr<LoraAdapter> adapter);
    i32 num_layers() const { return static_cast<i32>(layers_.size()); }
    i32 num_experts() const { return max_experts_; }
    i32 num_latent_heads() const { return max_latent_heads_; }  // the most of a layer
    // Keep the inputs of these layers, in rising order, in every step from now on.
    void keep_inputs(std::vector<i32> layers);
    // Write the queries of these rows of the next step, as attention reads them, to `out`: layer by layer [rows][num_heads * head_dim].
    void copy_queries(std::vector<i32> rows, float* out);
    void finish();
    void step(const StepInput& given);
    // A step, then drafts after the last token of every sequence. Its wanted rows and logits are set here.
    void draft(const StepInput& input, const DraftRun& run);
    // The features of the first `count` wanted rows of the last step for the next rows: [count][hidden].
    void recycled(i32 count, float* out);
    // The kept inputs of rows of the last step's tokens: [count][layers][hidden].
    void layer_inputs(const i32* rows, i32 count, float* out);
    // Logits of rows of the last step, which must have kept all.
    void logits(const i32* rows, i32 count, float* out);
    // Hidden states after the final norm, [count][hidden], of rows that the last step kept: of all, otherwise indices into
    // wanted_rows.
    void hidden_states(const i32* rows, i32 count, float* out);
    // Tokens that each expert of each layer has got so far, on all ranks together; of layers without experts empty.
    std::vector<std::vector<i64>> expert_tokens();
    // Change how experts are chosen, after finish. Throws std::invalid_argument for layers whose routing it does not fit.
    void set_lossy_routing(const LossyRouting& lossy);
    // What lossy routing has done in each layer; of layers without experts, and where it is off, zeros.
    std::vector<RoutingCounts> routing_counts();
    // Give the rank another placement of the experts of a layer, between two steps. added: weights of experts that it holds from now
    // on; those of experts that it does not hold any more are let go. Throws std::invalid_argument, and changes nothing, if a weight
    // has another form than the layer's, or one that the rank is to hold is missing.
    void place_experts(i32 layer, const std::vector<std::pair<i32, Expert>>& added, std::vector<i32> copies, std::vector<i32> own_copies);
    // Let the bounds of sequences go, see BoundsRequest.
    void forget_bounds(const std::vector<i64>& keys);
    // Runs that steps with bounds might have skipped, and those that they have.
    std::vector<i64> run_counts() const { return {run_counts_[0], run_counts_[1]}; }
    // Copy keys and values of tokens to other slots, one after the other: in every layer that is windowed, or that is not.
    void move_tokens(const i64* from, const i64* to, i32 count, bool is_windowed);
    // Whether any layer has a recurrent state.
    bool has_states() const { return has_states_; }
    // Whether the keys and values of any layer are in blocks of their own, see PlanLayer::is_windowed.
    bool has_windows() const;
    i64 scratch_bytes() const;
    // Slots of a block of the caches, which are those of the last step.
    i32 block_size() const { return layers_[0]->kv.block_size; }
    i32 vocab() const { return vocab_; }
    // Whether the head's results are the logits: further operations on them could make different ones equal.
    bool has_plain_logits() const { return logit_scale_ == 1.0f && softcap_ == 0.0f; }

    Norm final_norm, embed_norm, feature_norm, per_layer_norm;
    int num_threads;
    bool is_near = false;  // the weights are expected in a cache
    bool uses_int8_head = true;  // whether the head's copy is used
    i64 num_prefiltered = 0;     // steps in which it was
    const Kernels* kernels_used;

private:
    friend struct StepRows;
    friend struct StepContext;
    friend struct StepExperts;
    friend struct StepLatent;
    friend struct StepIndex;
    friend struct StepEntry;
    friend struct StepStreams;
    friend struct StepMixer;
    friend struct StepBlock;
    friend struct Stepper;
    void measure(const Site& site, i64 rows);
    void finish_layer(PlanLayer& layer);
    void finish_attention(PlanLayer& layer);
    void finish_latent(PlanLayer& layer);
    void finish_indexer(PlanLayer& layer);
    void finish_mixer(PlanLayer& layer);
    void finish_block(PlanLayer& layer);
    void finish_mixture(PlanLayer& layer);
    void finish_streams(PlanLayer& layer);
    void reserve(i32 num_tokens, const Batch& batch);
    // Assign the memory that ranks share; its layout depends only on the steps so far, and is the same in every rank.
    void reserve_shared(i32 num_tokens, i32 num_logit_rows);
    // End a step of a rank: wait until all ranks have written their results. Throws std::runtime_error where the group is aborted.
    void meet_ranks();
    // Write a rank's best outputs to shared memory, before meet_ranks.
    void share_best(const StepInput& input, int num_threads_used);
    // Return on rank 0, after meet_ranks, the results of all ranks: logits [num_rows][vocab], or the best outputs [num_rows], which all
    // ranks of a pipeline stage get.
    void take_results(i32 num_rows, float* logits, i32* best);
    void reserve_attention(const Batch& batch);
    // Take the memory of the bounds of a step, and keep what it has written.
    void begin_bounds(const StepInput& input);
    void keep_bounds(const StepInput& input);
    // Find the pieces of a step for layers with an indexer, and take the memory of their keys.
    void reserve_choice(const Batch& batch);
    // The memory that ranks share with divided rows.
    void reserve_divided();
    // Write how many tokens the experts have got on this rank, for rank 0; before a barrier.
    void share_expert_tokens();
    // Take the size of the buffers for partial results of a batch, and the tables of a rank's own blocks.
    void prepare_context(const Batch& batch);
    // Prepare for the best tokens of this many rows.
    void begin_best(i32 num_rows);
    // Group the rows of a step, or rows of the last step that get logits, by their adapters.
    void begin_lora(const StepInput& input);
    void begin_lora_logits(const i32* rows, i32 count);
    // Throw std::invalid_argument where a step is not one of this plan.
    void check_step(const StepInput& input) const;
    // Set last_ask_ for a step.
    void find_last_ask(const StepInput& input);

    std::mutex guard_;  // one step at a time, since its memory belongs to the plan
    RankGroup group_;
    RankGroup row_group_;  // the ranks that divide the rows of a step
    // Shared by ranks: rows of q and k of all heads (only where these are normed as a whole), logits, and the best output of each rank.
    float *whole_qk_ = nullptr, *shared_logits_ = nullptr, *rank_best_values_ = nullptr;
    i32* rank_best_indices_ = nullptr;
    float* spare_ = nullptr;  // a rank's own: rows as wide as x_ or attended_
    i32 shared_rows_ = 0, shared_logit_rows_ = 0;
    // Shared by ranks that share the tokens of sequences: rows of the queries, keys and values of all heads, and partial results.
    float* context_rows_ = nullptr;
    i32 context_row_size_ = 0;
    u8* context_buffers_[2] = {nullptr, nullptr};
    i64 context_buffer_bytes_ = 0;
    std::vector<i32> local_tables_;
    // Shared by ranks that divide the rows: keys and values of all tokens of a layer, in two buffers that layers use in turn, and the
    // rows after the last layer.
    DividedRows divided_;
    StepInput home_input_;        // with homes: the sequences of this rank, whose rows are in divided_
    float* home_out_ = nullptr;   // the results of their attention
    float* home_rows_ = nullptr;  // shared by the ranks of homes of several: the results of all heads, in rows of home_row_size_
    i64 home_row_size_ = 0;
    StepInput given_;  // the whole step
    float *divided_kv_[2] = {nullptr, nullptr}, *divided_x_ = nullptr;
    i64* divided_expert_tokens_ = nullptr;  // [ranks][layers * experts]
    i32 divided_kv_size_ = 0, divided_capacity_ = 0;
    i32 whole_qk_size_ = 0, own_row_size_ = 0;
    i32 hidden_, vocab_;
    bool is_bf16_;
    bool is_stage_ = false, is_first_stage_ = true, is_last_stage_ = true;
    i32 first_layer_ = 0;
    std::shared_ptr<NativeWeight> embed_, position_embed_, head_;
    float embed_scale_ = 1.0f, logit_scale_ = 1.0f, softcap_ = 0.0f;
    std::shared_ptr<NativeWeight> per_layer_embed_, per_layer_projection_;
    i32 per_layer_size_ = 0;  // of one layer
    float per_layer_embed_scale_ = 1.0f, per_layer_projection_scale_ = 1.0f, per_layer_sum_scale_ = 1.0f;
    Site per_layer_site_;
    float *per_layer_ = nullptr, *gated_ = nullptr;  // inputs of all layers, and what one has made of its own
    struct Streams {
        i32 count = 1, active = 0;
        std::vector<std::shared_ptr<NativeWeight>> split, join;
        Site split_site, join_site;
        std::vector<i32> split_forms, join_forms;
    };
    Streams streams_;
    i32 laurel_rank_ = 0;
    float *stream_rows_ = nullptr, *stream_routes_ = nullptr;  // [rows][count] of rows, and of products of a router
    float *laurel_inner_ = nullptr, *laurels_ = nullptr;
    std::vector<std::shared_ptr<PlanLayer>> layers_;
    struct Angles { const float *cosine = nullptr, *sine = nullptr; i64 count = 0; i32 half = 0; };
    std::vector<Angles> angles_;
    Site head_site_, fuse_site_;
    Entry entry_ = Entry::token;
    std::shared_ptr<NativeWeight> fuse_;
    bool is_residual_normed_ = false, recycles_normed_ = true;
    std::vector<i32> kept_layers_;
    struct SequenceBounds {
        i32 num_runs = 0;
        std::vector<std::vector<float>> values;  // of each layer
        std::vector<float*> layers;
    };
    std::unordered_map<i64, SequenceBounds> bounds_;
    std::vector<KeyBounds> step_bounds_;  // of the sequences of the step; empty: none has any
    i64 run_counts_[2] = {0, 0};
    std::vector<i32> query_rows_;  // of the next step, see copy_queries
    float* queries_out_ = nullptr;
    i32 beside_size_ = 0;
    float *beside_ = nullptr, *kept_ = nullptr;  // rows of twice the hidden size; inputs of layers
    i32 qkv_size_ = 0, attention_size_ = 0, inner_size_ = 0, max_experts_ = 0, max_top_k_ = 0, max_latent_heads_ = 0;
    i32 latent_size_ = 0, question_size_ = 0, question_rank_ = 0, answer_size_ = 0;
    i64 packed_words_ = 0, packed_groups_ = 0;  // per row, the maximum of all sites; every thread packs a single row for itself
    // Memory of a step, made for capacity_ rows and grown when a step is larger.
    i32 capacity_ = 0;
    int row_threads_ = 0;  // that row_ has room for
    i64 attention_bytes_ = 0;
    Memory arena_{0}, attention_scratch_{0};
    float *own_x_ = nullptr;  // the plan's own rows of the residual stream, which x_ are unless they are the caller's
    float *x_ = nullptr, *qkv_ = nullptr, *attended_ = nullptr, *inner_ = nullptr, *extra_ = nullptr, *normed_ = nullptr, *row_ = nullptr;
    float *route_logits_ = nullptr, *route_weights_ = nullptr, *pair_weight_ = nullptr, *pair_out_ = nullptr;
    float *shared_out_ = nullptr, *shared_scales_ = nullptr;
    // Of multi-head latent attention: cached rows, queries before the projection to the latent space, and outputs after it.
    float *latent_ = nullptr, *question_ = nullptr, *question_a_ = nullptr, *answer_ = nullptr;
    // With an indexer: its heads, keys and weights of heads; and what is gathered.
    KeyChoice choice_;
    i32 index_heads_size_ = 0, index_size_ = 0, index_num_heads_ = 0;
    float *index_heads_ = nullptr, *index_keys_ = nullptr, *index_weights_ = nullptr;
    // Of mixers: rows of projected inputs, convolved channels, second projections, and results, which ranks share; and the values of the
    // recurrence, one token after the other without gaps.
    bool has_states_ = false;
    i32 mix_in_size_ = 0, mix_conv_size_ = 0, mix_low_size_ = 0, mix_shared_size_ = 0, mix_values_ = 0, mix_keys_ = 0, mix_decays_ = 0, mix_heads_ = 0, gate_size_ = 0;
    float *mix_in_ = nullptr, *mix_conv_ = nullptr, *mix_low_ = nullptr, *mix_normed_ = nullptr, *mix_shared_ = nullptr, *gate_rows_ = nullptr;
    float *mix_q_ = nullptr, *mix_k_ = nullptr, *mix_v_ = nullptr, *mix_out_ = nullptr, *mix_decay_ = nullptr, *mix_beta_ = nullptr;
    // With shared blocks: the embeddings, the results of adapters' first matrices and of `up`.
    bool has_blocks_ = false;
    i32 block_rank_ = 0;
    float *block_embeddings_ = nullptr, *block_low_ = nullptr, *block_up_ = nullptr;
    std::vector<StateSave> state_saves_;  // of the layer that is computed
    std::vector<ConvSave> conv_saves_;
    bool has_shared_ = false;
    i32 pair_size_ = 0, expert_latent_size_ = 0;  // of what an expert gives, and of what experts read where it is a projection
    float* expert_latents_ = nullptr;
    i32 *chosen_ = nullptr, *pair_row_ = nullptr, *pair_of_ = nullptr, *expert_start_ = nullptr;
    // Of the mixture that is computed: the experts of this rank, the first place and the number of places of each, and all these places.
    i32 *own_experts_ = nullptr, *own_first_ = nullptr, *own_count_ = nullptr, *own_places_ = nullptr;
    i32 num_own_experts_ = 0, num_own_places_ = 0;
    std::vector<std::vector<i64>> expert_tokens_;
    LossyRouting lossy_;
    std::vector<RoutingCounts> routing_counts_;
    std::vector<std::vector<float>> corrections_;  // with a bias by load, of each layer: the routing's correction plus the bias
    u32* packed_data_ = nullptr;
    float *packed_scales_ = nullptr, *packed_sums_ = nullptr;
    i32* packed_starts_ = nullptr;
    std::vector<float> draft_logits_;  // of the passes of a run of drafts
    std::vector<float> best_values_;   // of a step that gives no logits: [rows][threads]
    std::vector<i32> best_indices_;
    std::unique_ptr<Int8Head> int8_head_;
    ArgmaxPrefilter prefilter_;
    bool is_prefiltering_ = false;  // in this step
    // Of the last layer, where only wanted rows have queries; the other tokens count as cached.
    Batch last_ask_;
    bool has_last_ask_ = false;
    std::vector<i32> last_starts_;
    std::vector<LinearJob> jobs_;
    LoraState lora_;
    std::vector<Packed> packs_;
};

}  // namespace quire
