package supervisor

import (
	"errors"
	"fmt"
)

// Failure is an error with advice: what happened, and on a second line what to do (DX-5). It crosses process borders.
type Failure struct {
	What string
	Hint string `json:",omitempty"`
}

func (f *Failure) Error() string { return f.What }

// hint adds advice to err; the innermost advice wins.
func hint(err error, format string, args ...any) error {
	var f *Failure
	if err == nil || errors.As(err, &f) {
		return err
	}
	return &Failure{What: err.Error(), Hint: fmt.Sprintf(format, args...)}
}

// refusal is a Failure that has no other cause.
func refusal(what, hint string) error { return &Failure{What: what, Hint: hint} }

// asFailure makes err fit to be sent; nil stays nil.
func asFailure(err error) *Failure {
	if err == nil {
		return nil
	}
	var f *Failure
	if errors.As(err, &f) {
		return &Failure{What: err.Error(), Hint: f.Hint}
	}
	return &Failure{What: err.Error()}
}

// HintOf returns the advice that err carries, "" if none.
func HintOf(err error) string {
	var f *Failure
	if errors.As(err, &f) {
		return f.Hint
	}
	return ""
}
