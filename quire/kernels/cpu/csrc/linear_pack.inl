// Rows of inputs, packed in the order of the tiles: rounded to bf16, or quantised to bytes.
namespace quire::QUIRE_ISA {
namespace {

// Sixteen inputs from j on, in the order of the packed weight, 0 past the end.
QUIRE_INLINE F32 inputs_at(const Packed& x, const float* values, i32 j) {
    if (x.columns == nullptr) return load(values + j, first_lanes(x.k - j));
    float lanes[16] = {};
    for (int i = 0; i < 16 && j + i < x.k; ++i) lanes[i] = values[x.columns[j + i]];
    return load(lanes);
}

// Quantise words [begin, end) of a row to data[0], data[apart] and so on: round(x * inverse), at most 127 in size also where 127
// / peak overflows. Return the sum of the codes. None is -128, though formats that declare such inputs have 127.5 steps and that
// code: AVX2 multiplies bytes in pairs of 16 bits, which two products of -128 and -128 leave.
i32 pack_group(const Packed& x, const float* values, u32* data, i64 apart, i32 begin, i32 end, float inverse) {
    I32 sum = set1(0);
    for (i32 j = 4 * begin; j < 4 * end; j += 16) {
        i8 codes[16];
        const F32 v = select(first_lanes(4 * end - j), inputs_at(x, values, j), zero());
        // NaN becomes the smallest integer: its group has no valid scale, but sums must not overflow.
        const I32 code = max(set1(-128), to_i32(max(set1(-127.0f), min(set1(127.0f), v * set1(inverse)))));
        sum = sum + code;
        store_s8(codes, code);
        u32* to = data + (j / 4 - begin) * apart;
        if (apart == 1 && j + 16 <= 4 * end) {
            __builtin_memcpy(to, codes, 16);
            continue;
        }
        for (int w = 0; w < 4 && j / 4 + w < end; ++w) __builtin_memcpy(to + w * apart, codes + 4 * w, 4);
    }
    // Exact: at most 60,000 codes.
    return static_cast<i32>(sum_lanes(to_f32(sum)));
}

QUIRE_INLINE i32 first_word_of(const Packed& x, i32 begin) { return begin / x.input_group * ceil_div(x.input_group, 4); }

// Quantise inputs [begin_input, end_input) of a row to data[0], data[apart] and so on; the scales and sums go to their places.
void pack_quantized(const Packed& x, const float* values, RowPlace place, u32* data, i64 apart, i32 begin_input, i32 end_input) {
    const i64 first = place.first;
    const i32 rows = place.rows, r = place.r, first_word = first_word_of(x, begin_input);
    const i32 words = steps_of(Format::u8, x.k), group_words = ceil_div(x.group, 4), block_words = ceil_div(x.input_group, 4);
    const i32 num_blocks = groups_of(x.k, x.input_group), first_block = begin_input / x.input_group;
    const i64 first_group = static_cast<i64>(first_block) * (x.input_group / x.group);
    float* scales = x.scales + first * num_blocks + static_cast<i64>(first_block) * rows + r;
    i32* starts = x.starts + first * groups_of(x.k, x.group) + first_group * rows + r;
    float* sums = x.sums + first * groups_of(x.k, x.group) + first_group * rows + r;
    for (i32 b = first_block; b < num_blocks && b * x.input_group < end_input; ++b, scales += rows) {
        // The last group includes the padding of K.
        const i32 block = b * block_words, stop = b + 1 < num_blocks ? block + block_words : words;
        const i32 used = (b + 1 < num_blocks ? stop * 4 : x.k) - block * 4, num_groups = ceil_div(used, x.group);
        F32 peak = zero();
        Mask broken = mask_of(0);
        for (i32 j = 4 * block; j < 4 * stop; j += 16) {
            const F32 v = select(first_lanes(4 * stop - j), inputs_at(x, values, j), zero());
            broken = broken | is_nan(v);
            peak = max(peak, abs(v));
        }
        const float largest = max_lanes(peak);
        *scales = bits(broken) != 0 ? __builtin_nanf("") : largest / 127.0f;
        const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
        for (i32 g = 0; g < num_groups; ++g, starts += rows, sums += rows) {
            const i32 begin = block + g * group_words, end = g + 1 < num_groups ? begin + group_words : stop;
            const i32 sum = pack_group(x, values, data + (begin - first_word) * apart, apart, begin, end, inverse);
            *starts = -128 * sum;
            *sums = static_cast<float>(sum);
        }
    }
}

// Sixteen words from input j on of a row that is not quantised.
QUIRE_INLINE I32 words_at(const Packed& x, const float* values, i32 j) {
    if (x.kind != Format::bf16) return as_i32(inputs_at(x, values, j));
    return dot_words(inputs_at(x, values, j), j + 16 < x.k ? inputs_at(x, values, j + 16) : zero());
}

// Up to sixteen rows of a tile: their words are transposed in registers, so that those of one step are written together.
void pack_together(const Packed& x, RowPlace place, i32 count, const float* values, i64 stride, i32 begin, i32 end) {
    const i32 per_word = x.kind == Format::bf16 ? 2 : 1, stop = ceil_div(end, per_word);
    I32 words[16] = {};
    for (i32 word = begin / per_word; word < stop; word += 16) {
        for (i32 i = 0; i < count; ++i) words[i] = words_at(x, values + i * stride, word * per_word);
        store_columns(word_at(x, place, word), place.rows, words, count, stop - word < 16 ? stop - word : 16);
    }
}

// The same for inputs that are quantised, through memory for PIECE inputs of each row, of whole input groups.
constexpr i32 PIECE = 1024;
void pack_quantized_together(const Packed& x, RowPlace place, i32 count, const float* values, i64 stride, i32 begin, i32 end) {
    alignas(64) i32 codes[16][PIECE / 4 + 32];  // with the padding of K, and room for reads past the end
    const i32 piece = PIECE / x.input_group * x.input_group;
    for (; begin < end; begin += piece) {
        const i32 last = end - begin < piece ? end : begin + piece;
        const i32 first_word = begin / 4, stop = last == x.k ? steps_of(Format::u8, x.k) : last / 4;
        for (i32 i = 0; i < count; ++i)
            pack_quantized(
                x, values + i * stride, {place.first, place.rows, place.r + i}, reinterpret_cast<u32*>(codes[i]), 1, begin, last);
        I32 words[16] = {};
        for (i32 word = first_word; word < stop; word += 16) {
            for (i32 i = 0; i < count; ++i) words[i] = load(codes[i] + word - first_word);
            store_columns(word_at(x, place, word), place.rows, words, count, stop - word < 16 ? stop - word : 16);
        }
    }
}

void pack_row(const Packed& x, i32 row, const float* values, i32 begin, i32 end) {
    const RowPlace place = place_of(x, row);
    if (is_integer(x.kind))
        pack_quantized(x, values, place, word_at(x, place, first_word_of(x, begin)), place.rows, begin, end);
    else
        pack_together(x, place, 1, values, 0, begin, end);
}

void pack_rows(const Packed& x, i32 first, i32 count, const float* values, i64 stride, i32 begin, i32 end) {
    const bool is_apart = is_integer(x.kind) && (x.input_group > PIECE || x.input_group % 4 != 0);
    for (i32 row = first, together; row < first + count; row += together, values += together * stride) {
        const RowPlace place = place_of(x, row);
        together = place.rows - place.r < 16 ? place.rows - place.r : 16;
        if (together > first + count - row) together = first + count - row;
        if (is_apart) {
            for (i32 i = 0; i < together; ++i) pack_row(x, row + i, values + i * stride, begin, end);
        } else if (is_integer(x.kind)) {
            pack_quantized_together(x, place, together, values, stride, begin, end);
        } else {
            pack_together(x, place, together, values, stride, begin, end);
        }
    }
}

}  // namespace
}  // namespace quire::QUIRE_ISA
