// What a library says of itself, for alignkit/built.py to compare with what it expects: the sources it was built from,
// and where each field of a struct lies that Python fills.
#pragma once
#include <cstddef>

#ifndef ALIGNKIT_SOURCES  // their hash; setup.py gives it
#define ALIGNKIT_SOURCES unknown
#endif
#define ALIGNKIT_TEXT_(x) #x
#define ALIGNKIT_TEXT(x) ALIGNKIT_TEXT_(x)

// Once in a library, in a file identity.*: only that one is compiled again where any source changed.
#define ALIGNKIT_IDENTITY \
    extern "C" const char* alignkit_sources() { return ALIGNKIT_TEXT(ALIGNKIT_SOURCES); }

struct AlignkitField {
    const char* name;  // null ends a struct's fields
    std::size_t offset, size;
};

// f(s, x) for each x of the arguments, up to 64.
#define ALIGNKIT_TWICE_0(...) ALIGNKIT_TWICE_1(ALIGNKIT_TWICE_1(__VA_ARGS__))
#define ALIGNKIT_TWICE_1(...) ALIGNKIT_TWICE_2(ALIGNKIT_TWICE_2(__VA_ARGS__))
#define ALIGNKIT_TWICE_2(...) ALIGNKIT_TWICE_3(ALIGNKIT_TWICE_3(__VA_ARGS__))
#define ALIGNKIT_TWICE_3(...) ALIGNKIT_TWICE_4(ALIGNKIT_TWICE_4(__VA_ARGS__))
#define ALIGNKIT_TWICE_4(...) ALIGNKIT_TWICE_5(ALIGNKIT_TWICE_5(__VA_ARGS__))
#define ALIGNKIT_TWICE_5(...) __VA_ARGS__
#define ALIGNKIT_NOTHING
#define ALIGNKIT_REST() ALIGNKIT_STEP
#define ALIGNKIT_STEP(f, s, x, ...) f(s, x) __VA_OPT__(ALIGNKIT_REST ALIGNKIT_NOTHING()(f, s, __VA_ARGS__))
#define ALIGNKIT_EACH(f, ...) ALIGNKIT_TWICE_0(ALIGNKIT_STEP(f, __VA_ARGS__))
#define ALIGNKIT_FIELD(s, x) {#x, offsetof(s, x), sizeof(s::x)},

// ALIGNKIT_LAYOUT(Struct, each, of, its, fields): exports them as alignkit_layout_Struct, after the struct itself, named
// "". A field that is left out does not compile.
#define ALIGNKIT_LAYOUT(s, ...)                                                    \
    [[maybe_unused]] static void alignkit_all_fields_of_##s(const s& value) {      \
        [[maybe_unused]] const auto& [__VA_ARGS__] = value;                        \
    }                                                                              \
    extern "C" {                                                                   \
    extern const AlignkitField alignkit_layout_##s[];                              \
    const AlignkitField alignkit_layout_##s[] = {                                  \
        {"", 0, sizeof(s)}, ALIGNKIT_EACH(ALIGNKIT_FIELD, s, __VA_ARGS__){nullptr, 0, 0}}; \
    }
