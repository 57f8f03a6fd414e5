"""Names of tensors as unique identifiers, legal in C, C++, Rust, Python and assemblers.

Has the reserved words, and resolves collisions of names; the generators use the identifiers.
"""

from __future__ import annotations

import re
import unicodedata
import zlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from zcrecord.errors import UnsupportedError, printable

# Words that generators append to a tensor's identifier, as `dim0`, `dim1`, ... No word contains an underscore: with
# words "a_b" and "b", the identifiers x and x + "_a" would both have an x_a_b.
_DERIVED = """
    alignment bits count dims dtype info name nbytes offset place rank shape strides type
"""
# Words that generators append to a file's stem.
_PER_FILE = """
    aligned alignment archive archive_size blob check check_double check_float h hpp inc index_crc inline is_current
    namespace packed section tensors underscore zcr
"""
_LONGEST = 160  # characters; linkers take more, people and some debug formats do not

# Keywords of C, C++, Rust and Python; macros that compilers define without underscores; registers and operators of
# assemblers; functions of the C library and of compilers, which a symbol of that name would replace.
_WORDS = """
    abstract alignas alignof and and_eq as asm assert async atomic auto await become bitand bitor bool box break case
    catch char char16_t char32_t char8_t class co_await co_return co_yield compl concept const const_cast consteval
    constexpr constinit continue crate decltype def default del delete do double dyn dynamic_cast elif else enum except
    explicit export extern false final finally float fn for friend from gen global goto if impl import in inline int is
    lambda let long loop macro macro_rules match mod module move mut mutable namespace new noexcept none nonlocal not
    not_eq nullptr operator or or_eq override pass priv private protected pub public raise raw ref register
    reinterpret_cast requires restrict return safe self short signed sizeof static static_assert static_cast struct
    super switch synchronized template this thread_local throw trait true try type typedef typeid typename typeof
    typeof_unqual union unsafe unsigned unsized use using virtual void volatile wchar_t where while with xor xor_eq
    yield

    ah al arm ax bh bl bp bss bx byte ch cl cr cs cx data dh di dl ds dword dx eax ebp ebx ecx edata edi edx end environ
    eq errno es esi esp etext far flat fp fs ge gp gs gt hi huge i386 inf infinity ip le length linux lo lr lt main mips
    nan ne near null offset pc print ptr qword ra rax rbp rbx rcx rdi rdx rsi rsp sb shl shr si size sl sp sparc sr ss
    st start stderr stdin stdout text tp unix vax word wr zero

    abort abs alloca asctime atexit atof atoi atol atoll bcmp bcopy bsearch bzero calloc clearerr clock ctime dcgettext
    dgettext difftime div execl execle execlp execv execve execvp exit fclose feclearexcept feholdexcept feof
    feraiseexcept ferror fesetenv fesetround fetestexcept feupdateenv fflush ffs ffsl ffsll fgetc fgetpos fgets fgetwc
    fgetws fopen fork fprintf fprintf_unlocked fputc fputc_unlocked fputs fputs_unlocked fputwc fputws fread free
    freopen fscanf fseek fsetpos ftell fwide fwprintf fwrite fwrite_unlocked fwscanf gamma_r gammaf_r gammal_r getc
    getchar getenv gets gettext getwc getwchar gmtime imaxabs imaxdiv index isalnum isalpha isascii isblank iscntrl
    isdigit isgraph islower isprint ispunct isspace isupper iswalnum iswalpha iswblank iswcntrl iswctype iswdigit
    iswgraph iswlower iswprint iswpunct iswspace iswupper iswxdigit isxdigit kill labs ldiv lgamma_r lgammaf_r lgammal_r
    link llabs lldiv localeconv localtime longjmp malloc mblen mbrlen mbrtowc mbsinit mbsrtowcs mbstowcs mbtowc memccpy
    memchr memcmp memcpy memmem memmove mempcpy memset mktime nanf nanl open perror printf printf_unlocked putc putchar
    putchar_unlocked puts puts_unlocked putwc putwchar qsort quick_exit rand read realloc reallocarray remove rename
    rewind rindex scanf setbuf setjmp setlocale setvbuf signal sleep snprintf sprintf srand sscanf stat stpcpy stpncpy
    strcasecmp strcat strchr strcmp strcoll strcpy strcspn strdup strerror strfmon strftime strlen strncasecmp strncat
    strncmp strncpy strndup strnlen strpbrk strrchr strspn strstr strtod strtof strtok strtol strtold strtoll strtoul
    strtoull strxfrm swprintf swscanf system time times tmpfile tmpnam toascii tolower toupper towctrans towlower
    towupper ungetc ungetwc unlink utime va_arg va_copy va_end va_start vfprintf vfscanf vfwprintf vfwscanf vprintf
    vscanf vsnprintf vsprintf vsscanf vswprintf vswscanf vwprintf vwscanf wait wcrtomb wcscat wcschr wcscmp wcscoll
    wcscpy wcscspn wcsftime wcslen wcsncat wcsncmp wcsncpy wcspbrk wcsrchr wcsrtombs wcsspn wcsstr wcstod wcstof wcstok
    wcstol wcstold wcstoll wcstombs wcstoul wcstoull wcsxfrm wctob wctomb wctrans wctype wmemchr wmemcmp wmemcpy
    wmemmove wmemset wprintf write wscanf

    alloc byte_t clock_t complex core ctype div_t err f128 f16 f32 f64 fenv fpos_t i128 i16 i32 i64 i8 imaginary int16_t
    int32_t int64_t int8_t intmax_t intptr_t inttypes isize iso646 jmp_buf limits locale math max_align_t memory
    nullptr_t numbers off_t offsetof ok option ptrdiff_t ranges ratio size_t some span ssize_t std stdalign stdarg
    stdatomic stdbool stdckdint stddef stdint stdio stdlib stdnoreturn str string strings tgmath thread threads time_t
    u128 u16 u32 u64 u8 uchar uint uint16_t uint32_t uint64_t uint8_t uintmax_t uintptr_t usize utility va_list valarray
    variant vector version wchar wint_t zcr zcrecord
"""
# Functions of <math.h> and <complex.h>: each for double, float and long double.
_MATH = """
    acos acosh asin asinh atan atan2 atanh cabs cacos cacosh carg casin casinh catan catanh cbrt ccos ccosh ceil cexp
    cimag clog conj copysign cos cosh cpow cproj creal csin csinh csqrt ctan ctanh drem erf erfc exp exp10 exp2 expm1
    fabs fdim finite floor fma fmax fmin fmod frexp gamma hypot ilogb isinf isnan j0 j1 jn ldexp lgamma llrint llround
    log log10 log1p log2 logb lrint lround modf nearbyint nextafter nexttoward pow pow10 remainder remquo rint round
    roundeven scalb scalbln scalbn signbit significand sin sincos sinh sqrt tan tanh tgamma trunc y0 y1 yn
"""
_RESERVED = frozenset(_WORDS.split()) | {name + suffix for name in _MATH.split() for suffix in ("", "f", "l")}
DERIVED = frozenset(_DERIVED.split())
PER_FILE = frozenset(_PER_FILE.split())
_LEGAL = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*_?")
_DIM = re.compile(r"dim[0-9]+")
_REGISTER = re.compile(r"([a-z]|c[rp]|f[ast]|[xyz]?mm|st)[0-9]{1,2}")  # of ARM, RISC-V, MIPS, x86
_RULE = "is lower-case letters, digits and single underscores, and"


def cleaned(name: str) -> str:
    """Return a name in lower-case letters, digits and single underscores, none at its ends; '' if nothing is left.

    Accents are dropped; other letters become `u` and their code point. A very long name is cut, and ends in its CRC-32.
    """
    if not name.isascii():
        letters = (c for c in unicodedata.normalize("NFKD", name) if not unicodedata.combining(c))
        name = "".join(c if ord(c) < 128 else f"_u{ord(c):x}_" for c in letters)
    out = _to_snake_case(name)
    if len(out) > _LONGEST:
        out = f"{out[: _LONGEST - 9].rstrip('_')}_{zlib.crc32(out.encode()):08x}"
    return out


def _to_snake_case(name: str) -> str:
    """Return a name in lower case, with one underscore for each run of other characters than ASCII letters, digits."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def stem_of(path: str) -> str:
    """Return a file's name as an identifier: without its folders and its last suffix, and never a reserved word."""
    name = re.split(r"[/\\]", path)[-1]
    return _stem(name.rpartition(".")[0] or name)


def _stem(name: str) -> str:
    return _legal_identifier(cleaned(name) or "model")


def check_name(name: str) -> str:
    """Return `name` if it is a legal stem of generated files, as `stem_of` makes them; else raise UnsupportedError."""
    proposed = _stem(str(name))
    if name != proposed:
        fault = f"a name {_RULE} not a reserved word; '{proposed}' would do"
        raise UnsupportedError(f"name '{printable(str(name))}': {fault}")
    return name


def check_prefix(prefix: str) -> str:
    """Return `prefix` if identifiers may start with it, or if it is empty; else raise UnsupportedError."""
    text = str(prefix)
    if prefix != text or (text and (not _LEGAL.fullmatch(text) or len(text) > _LONGEST)):
        fault = f"a prefix {_RULE} starts with a letter; '{_stem(text)}_' would do"
        raise UnsupportedError(f"prefix '{printable(text)}': {fault}")
    return prefix


class Identifier(NamedTuple):
    """An identifier, and whether more than cleaning was needed: it is numbered, or avoids a reserved word."""

    text: str
    changed: bool


def identifiers(names: Sequence[str], *, prefix: str, stem: str) -> list[Identifier]:
    """Return an identifier for each name, in that order; the same names give the same identifiers.

    All start with `prefix`. None is a word of C, C++, Rust, Python or an assembler, nor one that generators derive from
    `stem` or another identifier: beside `w` there is no `w_shape`. No two differ only in their case. The first of equal
    ones keeps its plain form; later ones are numbered from 2.
    """
    used = _UsedIdentifiers(f"{stem}_{word}" for word in PER_FILE)
    used.add(stem)
    plain = [_legal_identifier(cleaned(name) or "tensor", prefix) for name in names]
    out = [identifier if used.add(identifier) else "" for identifier in plain]
    numbers: dict[str, int] = {}  # the last one of each identifier, or many equal names would take quadratic time
    for i, identifier in enumerate(plain):
        if not out[i]:
            number = numbers.get(identifier, 1) + 1
            while not used.add(f"{identifier}_{number}"):
                number += 1
            numbers[identifier] = number
            out[i] = f"{identifier}_{number}"
    return [Identifier(text, text != prefix + _to_snake_case(name)) for text, name in zip(out, names, strict=True)]


class _UsedIdentifiers:
    """Identifiers in use, with all that are derived from them."""

    def __init__(self, words: Iterable[str]) -> None:
        self._used = set(words)
        self._bases: set[str] = set()  # identifiers that become used ones when a generator appends a word

    def add(self, identifier: str) -> bool:
        """Take an identifier; return False, and take nothing, if it or one derived from it is in use."""
        base, _, word = identifier.rpartition("_")
        derived = bool(base) and (word in DERIVED or _DIM.fullmatch(word) is not None)
        if identifier in self._used or identifier in self._bases or (derived and base in self._used):
            return False
        self._used.add(identifier)
        if derived:
            self._bases.add(base)
        return True


def _legal_identifier(name: str, prefix: str = "") -> str:
    """Return a cleaned name with its prefix; `t_` is put between them if the result is illegal or reserved."""
    whole = prefix + name
    illegal = whole in _RESERVED or not whole[:1].isalpha() or _REGISTER.fullmatch(whole)
    return f"{prefix}t_{name}" if illegal else whole
