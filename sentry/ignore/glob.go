package ignore

import "bytes"

// An opcode is one element of a compiled pattern.
type opcode uint8

const (
	opByte opcode = iota // the byte c
	opAny                // one byte, not '/'
	opSet                // one byte of sets[set]
	opStar               // any run without '/'
	opSpan               // any run at all
	opDirs               // nothing, or any run that ends in '/': what "**/" means
)

type token struct {
	op  opcode
	c   byte
	set uint16 // index into the rule set's byte sets
}

// A byteSet is a bracket expression; '/' is never a member.
type byteSet [4]uint64

func (s *byteSet) add(c byte)      { s[c>>6] |= 1 << (c & 63) }
func (s *byteSet) has(c byte) bool { return s[c>>6]&(1<<(c&63)) != 0 }

// compiler turns pattern text into tokens and shares equal byte sets between patterns.
type compiler struct {
	fold  bool // texts arrive with ASCII letters in lower case
	sets  []byteSet
	index map[byteSet]uint16
	full  bool // a byte set found no number: the rules cannot be trusted
}

func isSpecial(c byte) bool { return c == '*' || c == '?' || c == '[' || c == '\\' }

// literalLen is the length of the part of pat before its first special byte.
func literalLen(pat string) int {
	for i := range len(pat) {
		if isSpecial(pat[i]) {
			return i
		}
	}
	return len(pat)
}

// compile translates pat. For an anchored pattern (slashes true) pat must start after the literal
// prefix, since Git lets "**" count as leading there ("a**/b" covers "ab"). ok is false for a
// malformed pattern, which matches nothing in Git.
func (c *compiler) compile(pat string, slashes bool) (tokens []token, ok bool) {
	for i := 0; i < len(pat); {
		switch ch := pat[i]; ch {
		case '\\':
			if i+1 == len(pat) {
				return nil, false
			}
			// Not folded: in Git an escaped capital never matches when case is ignored.
			tokens = append(tokens, token{op: opByte, c: pat[i+1]})
			i += 2
		case '?':
			tokens = append(tokens, token{op: opAny})
			i++
		case '[':
			set, n, ok := c.bracket(pat[i:])
			if !ok {
				return nil, false
			}
			id, ok := c.intern(set)
			if !ok {
				return nil, false
			}
			tokens = append(tokens, token{op: opSet, set: id})
			i += n
		case '*':
			start := i
			for i < len(pat) && pat[i] == '*' {
				i++
			}
			rest := pat[i:]
			switch {
			case !slashes:
				tokens = append(tokens, token{op: opSpan})
			case i-start < 2 || start > 0 && pat[start-1] != '/':
				tokens = append(tokens, token{op: opStar})
			case rest == "" || len(rest) > 1 && rest[0] == '\\' && rest[1] == '/':
				tokens = append(tokens, token{op: opSpan})
			case rest[0] == '/':
				tokens = append(tokens, token{op: opDirs})
				i++
			default:
				tokens = append(tokens, token{op: opStar})
			}
		default:
			if c.fold {
				ch = lower(ch)
			}
			tokens = append(tokens, token{op: opByte, c: ch})
			i++
		}
	}
	return tokens, true
}

func (c *compiler) intern(s byteSet) (uint16, bool) {
	if id, ok := c.index[s]; ok {
		return id, true
	}
	if len(c.sets) > 0xffff {
		c.full = true
		return 0, false
	}
	if c.index == nil {
		c.index = make(map[byteSet]uint16)
	}
	id := uint16(len(c.sets))
	c.sets = append(c.sets, s)
	c.index[s] = id
	return id, true
}

// bracket reads the bracket expression at the start of pat and returns its length. ok is false when it
// is not terminated or names an unknown class.
func (c *compiler) bracket(pat string) (set byteSet, n int, ok bool) {
	i := 1
	negated := i < len(pat) && (pat[i] == '!' || pat[i] == '^')
	if negated {
		i++
	}
	prev := byte(0) // start of a possible range; 0 when there is none
	for first := true; ; first = false {
		if i >= len(pat) {
			return set, 0, false
		}
		ch := pat[i]
		if ch == ']' && !first {
			break
		}
		switch {
		case ch == '\\':
			if i++; i >= len(pat) {
				return set, 0, false
			}
			prev = pat[i]
			set.add(prev)
			i++
		case ch == '-' && prev != 0 && i+1 < len(pat) && pat[i+1] != ']':
			i++
			hi := pat[i]
			if hi == '\\' {
				if i++; i >= len(pat) {
					return set, 0, false
				}
				hi = pat[i]
			}
			c.addRange(&set, prev, hi)
			prev = 0
			i++
		case ch == '[' && i+1 < len(pat) && pat[i+1] == ':':
			length := bytes.IndexByte([]byte(pat[i+2:]), ']')
			if length < 0 {
				return set, 0, false
			}
			if length == 0 || pat[i+2+length-1] != ':' {
				set.add('[') // no ":]": an ordinary bracket, the rest is read again
				prev = '['
				i++
				continue
			}
			if !c.addClass(&set, pat[i+2:i+2+length-1]) {
				return set, 0, false
			}
			prev = 0
			i += 2 + length + 1
		default:
			prev = ch
			set.add(ch)
			i++
		}
	}
	if negated {
		for w := range set {
			set[w] = ^set[w]
		}
	}
	set['/'>>6] &^= 1 << ('/' & 63)
	return set, i + 1, true
}

func (c *compiler) addRange(set *byteSet, lo, hi byte) {
	for ch := int(lo); ch <= int(hi); ch++ {
		set.add(byte(ch))
		if c.fold {
			set.add(lower(byte(ch)))
		}
	}
}

func (c *compiler) addClass(set *byteSet, name string) bool {
	member, ok := classes[name]
	if !ok {
		return false
	}
	for ch := range 128 {
		if member(byte(ch)) {
			set.add(byte(ch))
			if c.fold && name == "upper" {
				set.add(lower(byte(ch)))
			}
		}
	}
	return true
}

// classes are the POSIX classes of the C locale.
var classes = map[string]func(byte) bool{
	"alnum":  func(c byte) bool { return isAlpha(c) || isDigit(c) },
	"alpha":  isAlpha,
	"blank":  func(c byte) bool { return c == ' ' || c == '\t' },
	"cntrl":  func(c byte) bool { return c < 32 || c == 127 },
	"digit":  isDigit,
	"graph":  func(c byte) bool { return c > 32 && c < 127 },
	"lower":  func(c byte) bool { return 'a' <= c && c <= 'z' },
	"print":  func(c byte) bool { return c >= 32 && c < 127 },
	"punct":  func(c byte) bool { return c > 32 && c < 127 && !isAlpha(c) && !isDigit(c) },
	"space":  func(c byte) bool { return c == ' ' || 9 <= c && c <= 13 },
	"upper":  func(c byte) bool { return 'A' <= c && c <= 'Z' },
	"xdigit": func(c byte) bool { return isDigit(c) || 'a' <= lower(c) && lower(c) <= 'f' },
}

func isAlpha(c byte) bool { return 'a' <= lower(c) && lower(c) <= 'z' }
func isDigit(c byte) bool { return '0' <= c && c <= '9' }

func lower(c byte) byte {
	if 'A' <= c && c <= 'Z' {
		return c + 'a' - 'A'
	}
	return c
}

// matchTokens reports whether the tokens cover all of text. It takes each step from *steps and gives up
// (answer meaningless) when that becomes negative.
//
// Two points to come back to are enough: the last '*' and the last run that may cross '/'. An earlier
// '*' could only let what follows start later in the same path component, an earlier crossing run only
// let it start later in the text; both reach no place that the later one does not reach.
func matchTokens(tokens []token, sets []byteSet, text []byte, steps *int) bool {
	var (
		i, j           int
		starI, starJ   = 0, -1
		crossI, crossJ = 0, -1
	)
	for {
		if *steps--; *steps < 0 {
			return false
		}
		if j == len(tokens) {
			if i == len(text) {
				return true
			}
		} else {
			tok := tokens[j]
			ok := false
			switch tok.op {
			case opStar:
				j++
				starI, starJ = i, j
				continue
			case opSpan, opDirs:
				j++
				crossI, crossJ, starJ = i, j, -1
				continue
			case opByte:
				ok = i < len(text) && text[i] == tok.c
			case opAny:
				ok = i < len(text) && text[i] != '/'
			case opSet:
				ok = i < len(text) && sets[tok.set].has(text[i])
			}
			if ok {
				i++
				j++
				continue
			}
		}
		switch {
		case starJ >= 0 && starI < len(text) && text[starI] != '/':
			starI++
			i, j = starI, starJ
		case crossJ < 0 || crossI >= len(text):
			return false
		case tokens[crossJ-1].op == opSpan:
			crossI++
			i, j, starJ = crossI, crossJ, -1
		default:
			skip := bytes.IndexByte(text[crossI:], '/')
			if skip < 0 {
				return false
			}
			*steps -= skip / 16
			crossI += skip + 1
			i, j, starJ = crossI, crossJ, -1
		}
	}
}

// MatchPath reports whether pattern covers the whole of path by the rules of an anchored pattern:
// wildcards stop at '/', but "**" between slashes does not. It is what Git uses in other places too, such
// as includeIf. ok is false when the pattern takes too long.
func MatchPath(pattern, path string, fold bool) (matched, ok bool) {
	text := []byte(path)
	if fold {
		lowerBytes(text)
	}
	c := &compiler{fold: fold}
	tokens, valid := c.compile(pattern, true)
	if !valid {
		return false, !c.full
	}
	steps := maxSteps
	matched = matchTokens(tokens, c.sets, text, &steps)
	return matched && steps >= 0, steps >= 0
}
