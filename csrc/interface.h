// The description that a kernel library gives alignkit/runtime/built.py: the hash of its sources, its functions with
// their types, and its structs with their fields. Python has no second list of parameters or fields.
#pragma once
#include <cstddef>
#include <cstdint>

#ifndef ALIGNKIT_SOURCES  // hash of the sources, defined by setup.py
#define ALIGNKIT_SOURCES unknown
#endif
#define ALIGNKIT_STRING_(x) #x
#define ALIGNKIT_STRING(x) ALIGNKIT_STRING_(x)

// Name of a type in `TYPES` of built.py, or of a struct that ALIGNKIT_STRUCT describes. Other types do not compile.
template <class T> struct AlignkitType;
#define ALIGNKIT_TYPE(type, name_) \
    template <> struct AlignkitType<type> { static constexpr const char* name = name_; };
ALIGNKIT_TYPE(void, "void")
ALIGNKIT_TYPE(int, "int")
ALIGNKIT_TYPE(int64_t, "int64")
ALIGNKIT_TYPE(uint64_t, "uint64")
ALIGNKIT_TYPE(float, "float")
ALIGNKIT_TYPE(double, "double")
ALIGNKIT_TYPE(const char*, "string")
template <class T> struct AlignkitType<T*> { static constexpr const char* name = "pointer"; };
template <class T> struct AlignkitType<T&> : AlignkitType<T*> {};
template <class T, std::size_t n> struct AlignkitType<T[n]> : AlignkitType<T> {};  // the size tells the length

struct AlignkitFunction {
    const void* address;
    const char* const* types;  // types of the result and the parameters; null after the last
};

template <class R, class... A> struct AlignkitTypes {
    AlignkitTypes(R (*)(A...)) {}
    static constexpr const char* all[] = {AlignkitType<R>::name, AlignkitType<A>::name..., nullptr};
};

// ALIGNKIT_FUNCTION_AS(name, function): export NAME_function, the description of a function.
#define ALIGNKIT_FUNCTION_AS(name, ...)                                                               \
    extern "C" {                                                                                      \
    extern const AlignkitFunction name##_function;                                                    \
    const AlignkitFunction name##_function = {reinterpret_cast<const void*>(&__VA_ARGS__),            \
                                              decltype(AlignkitTypes(&__VA_ARGS__))::all};            \
    }
#define ALIGNKIT_FUNCTION(name) ALIGNKIT_FUNCTION_AS(name, name)

// Export the source hash. Used once per library, by the file identity.*
#define ALIGNKIT_IDENTITY                                                                \
    static const char* alignkit_sources() { return ALIGNKIT_STRING(ALIGNKIT_SOURCES); } \
    ALIGNKIT_FUNCTION(alignkit_sources)

struct AlignkitField {
    const char* name;  // null after the last field
    const char* type;
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
#define ALIGNKIT_FIELD(s, x) {#x, AlignkitType<decltype(s::x)>::name, offsetof(s, x), sizeof(s::x)},

// ALIGNKIT_STRUCT(Struct, field...): export alignkit_struct_Struct, a null-terminated table of fields. Its first entry,
// named "", is the whole struct. Does not compile unless all fields are listed.
#define ALIGNKIT_STRUCT(s, ...)                                                                \
    template <> struct AlignkitType<s> { static constexpr const char* name = #s; };            \
    [[maybe_unused]] static void alignkit_all_fields_of_##s(const s& value) {                  \
        [[maybe_unused]] const auto& [__VA_ARGS__] = value;                                    \
    }                                                                                          \
    extern "C" {                                                                               \
    extern const AlignkitField alignkit_struct_##s[] __attribute__((weak)); /* in several files */ \
    const AlignkitField alignkit_struct_##s[] = {                                              \
        {"", "void", 0, sizeof(s)}, ALIGNKIT_EACH(ALIGNKIT_FIELD, s, __VA_ARGS__){nullptr, nullptr, 0, 0}}; \
    }
