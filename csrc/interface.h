// Build identity and struct layouts that a kernel library exports. alignkit/runtime/built.py compares them with the
// package's source hash and with the ctypes structs, and refuses a library that differs.
#pragma once
#include <cstddef>

#ifndef ALIGNKIT_SOURCES  // hash of the sources, defined by setup.py
#define ALIGNKIT_SOURCES unknown
#endif
#define ALIGNKIT_STRING_(x) #x
#define ALIGNKIT_STRING(x) ALIGNKIT_STRING_(x)

// Export the source hash. Used once per library, by the file identity.*
#define ALIGNKIT_IDENTITY \
    extern "C" const char* alignkit_sources() { return ALIGNKIT_STRING(ALIGNKIT_SOURCES); }

struct AlignkitField {
    const char* name;  // null after the last field
    std::size_t offset, size;
};

// ALIGNKIT_EACH(f, s, x...): f(s, x) for each x, at most 64, by recursive macro expansion.
#define ALIGNKIT_EVAL_0(...) ALIGNKIT_EVAL_1(ALIGNKIT_EVAL_1(__VA_ARGS__))
#define ALIGNKIT_EVAL_1(...) ALIGNKIT_EVAL_2(ALIGNKIT_EVAL_2(__VA_ARGS__))
#define ALIGNKIT_EVAL_2(...) ALIGNKIT_EVAL_3(ALIGNKIT_EVAL_3(__VA_ARGS__))
#define ALIGNKIT_EVAL_3(...) ALIGNKIT_EVAL_4(ALIGNKIT_EVAL_4(__VA_ARGS__))
#define ALIGNKIT_EVAL_4(...) ALIGNKIT_EVAL_5(ALIGNKIT_EVAL_5(__VA_ARGS__))
#define ALIGNKIT_EVAL_5(...) __VA_ARGS__
#define ALIGNKIT_EMPTY
#define ALIGNKIT_NEXT() ALIGNKIT_STEP
#define ALIGNKIT_STEP(f, s, x, ...) f(s, x) __VA_OPT__(ALIGNKIT_NEXT ALIGNKIT_EMPTY()(f, s, __VA_ARGS__))
#define ALIGNKIT_EACH(f, ...) ALIGNKIT_EVAL_0(ALIGNKIT_STEP(f, __VA_ARGS__))
#define ALIGNKIT_FIELD(s, x) {#x, offsetof(s, x), sizeof(s::x)},

// ALIGNKIT_LAYOUT(Struct, field...): export alignkit_layout_Struct, a null-terminated table of names, offsets and
// sizes. Its first entry, named "", is the whole struct. Does not compile unless all fields are listed.
#define ALIGNKIT_LAYOUT(s, ...)                                                            \
    [[maybe_unused]] static void alignkit_all_fields_of_##s(const s& value) {              \
        [[maybe_unused]] const auto& [__VA_ARGS__] = value;                                \
    }                                                                                      \
    extern "C" {                                                                           \
    extern const AlignkitField alignkit_layout_##s[];                                      \
    const AlignkitField alignkit_layout_##s[] = {                                          \
        {"", 0, sizeof(s)}, ALIGNKIT_EACH(ALIGNKIT_FIELD, s, __VA_ARGS__){nullptr, 0, 0}}; \
    }
